"""How often does `verify` fail a sound run? Each built-in model is made and verified many times, each time with new noise.

    python scripts/false_alarms.py --times 200 [-o docs/results/false-alarms.json]

A run stops at any time and goes on with the same file. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dpformer.trust.verify import verify_built_in
from dpformer.trust.verify.run import BUILT_IN


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=200)
    options.add_argument("-o", "--output", type=Path, default=Path("docs/results/false-alarms.json"))
    given = options.parse_args()
    found = {name: {"verified": 0, "failed": []} for name in BUILT_IN}
    if given.output.exists():
        found |= json.loads(given.output.read_text())
    while any(one["verified"] < given.times for one in found.values()):
        names = [name for name in BUILT_IN if found[name]["verified"] < given.times]
        for verification in verify_built_in(names):
            one = found[verification.subject]
            one["verified"] += 1
            one["failed"] += verification.failed
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    failed = sum(len(one["failed"]) for one in found.values())
    print(f"{sum(one['verified'] for one in found.values())} runs verified, {failed} false alarms")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
