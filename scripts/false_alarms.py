"""How often does `verify` fail a sound run? Each built-in model is made and verified many times, each time with new noise.

    python scripts/false_alarms.py --times 200 [-o docs/results/false-alarms.json]

A run stops at any time and goes on with the same file, if the code is still the same (`code`: hash of the rooms that `verify`
uses); else it starts from nothing. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import dpformer
from dpformer.trust.verify import verify_built_in
from dpformer.trust.verify.run import BUILT_IN

ROOMS = ("clipping", "data", "privacy", "statistics", "models", "training", "fit", "artifact", "trust")


def hash_of_code() -> str:
    """Of all modules of the rooms that `verify` uses."""
    source = Path(dpformer.__file__).parent
    modules = sorted(path for room in ROOMS for path in (source / room).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()[:16]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=200)
    options.add_argument("-o", "--output", type=Path, default=Path("docs/results/false-alarms.json"))
    given = options.parse_args()
    counts: dict[str, Any] = {name: {"verified": 0, "checks": 0, "failed": [], "not_checked": 0} for name in BUILT_IN}
    code = hash_of_code()
    before = json.loads(given.output.read_text()) if given.output.exists() else {}
    if before.get("code") == code:
        counts = before["models"]
    while names := [name for name in BUILT_IN if counts[name]["verified"] < given.times]:
        for verification in verify_built_in(names):
            one = counts[verification.subject]
            one["verified"] += 1
            one["checks"] += len(verification.checks)
            one["failed"] += verification.failed
            one["not_checked"] += sum(check.status == "not checked" for check in verification.checks)
            given.output.write_text(json.dumps({"code": code, "models": counts}, indent=1) + "\n")
    failed = sum(len(one["failed"]) for one in counts.values())
    print(f"{sum(one['verified'] for one in counts.values())} runs verified, {failed} false alarms")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
