"""How often does `verify` fail a sound run? Each built-in model is made and verified many times, each time with new noise.

    python scripts/false_alarms.py --times 200 [-o docs/results/false-alarms.json]

A run stops at any time and goes on with the same file. The accounting, in which nothing is random, is computed once a question.
Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpformer.fit import recipe
from dpformer.trust.verify import ledger, verify_built_in
from dpformer.trust.verify.run import BUILT_IN


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, computed once for each set of arguments."""
    kept: dict[str, Any] = {}

    def look_up(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))
        if key not in kept:
            kept[key] = function(*arguments, **options)
        return kept[key]

    return look_up


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=200)
    options.add_argument("-o", "--output", type=Path, default=Path("docs/results/false-alarms.json"))
    given = options.parse_args()
    recipe.make_plan = cached(recipe.make_plan)  # type: ignore[assignment]
    ledger.interval = cached(ledger.interval)  # type: ignore[assignment]
    counts: dict[str, Any] = {name: {"verified": 0, "checks": 0, "failed": [], "not_checked": 0} for name in BUILT_IN}
    if given.output.exists():
        counts |= json.loads(given.output.read_text())
    while names := [name for name in BUILT_IN if counts[name]["verified"] < given.times]:
        for verification in verify_built_in(names):
            one = counts[verification.subject]
            one["verified"] += 1
            one["checks"] += len(verification.checks)
            one["failed"] += verification.failed
            one["not_checked"] += sum(check.status == "not checked" for check in verification.checks)
            given.output.write_text(json.dumps(counts, indent=1) + "\n")
    failed = sum(len(one["failed"]) for one in counts.values())
    print(f"{sum(one['verified'] for one in counts.values())} runs verified, {failed} false alarms")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
