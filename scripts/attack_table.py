"""Audit every preset at two claims, and write the table of attacks, bounds and controls into docs/trust.md.

python scripts/attack_table.py            half an hour of one core; docs/results/audit.json has all figures
    python scripts/attack_table.py --presets paper       some of them again
python scripts/attack_table.py --only-table        write the table again from docs/results/audit.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from dpformer.fit.presets import PRESETS
from dpformer.trust.audit import Audit, audit, of_preset
from dpformer.trust.audit.page import html, markdown
from dpformer.trust.audit.suite import Attack, Finding

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "results" / "audit.json", DOCS / "trust.md"
BEGIN, END = "<!-- attacks: scripts/attack_table.py -->\n", "<!-- end of attacks -->\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--presets", nargs="*", default=list(PRESETS))
    options.add_argument("--epsilons", nargs="*", type=float, default=[1.0, 4.0])
    options.add_argument("--fits", type=int, default=None)
    options.add_argument("--only-table", action="store_true")
    options.add_argument("--html", type=Path, default=None, help="also write a page")
    given = options.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cpu_seconds": {}, "audits": []}
    for epsilon in [] if given.only_table else given.epsilons:
        for preset in given.presets:
            began = time.process_time()
            done = audit(of_preset(preset, epsilon, fits=given.fits))
            results["cpu_seconds"][f"{preset} {epsilon:g}"] = round(time.process_time() - began)
            others = [one for one in results["audits"] if key(one) != key(done.to_json())]
            results["audits"] = sorted([*others, done.to_json()], key=key)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(markdown([done]), results["cpu_seconds"], flush=True)
    audits = [read(one) for one in results["audits"]]
    write_table(audits)
    if given.html:
        given.html.write_text(html(audits))


def key(audit: dict) -> tuple[int, float]:
    """Presets in their order, then the claim; audits that are not made again are kept."""
    return list(PRESETS).index(audit["setting"].removeprefix("preset ")), round(audit["epsilon"], 2)


def read(audit: dict) -> Audit:
    """An audit from its JSON."""
    attacks = [
        Attack(
            *(one["name"], one["what"], one["defect"], Finding(**one["found"]), Finding(**one["control"])),
            *(one["claimed_epsilon"], one["claimed_mu"]),
        )
        for one in audit["attacks"]
    ]
    own = {name: audit[name] for name in ("setting", "seed", "fits", "epsilon", "delta", "mu")}
    return Audit(**own, attacks=attacks)


def write_table(audits: list[Audit]) -> None:
    """Between the two marks of the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "\n" + markdown(audits) + "\n" + END + after)


if __name__ == "__main__":
    main()
