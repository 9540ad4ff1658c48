"""Fit every preset with a fixed seed on a small log and print a hash of each released model.

    python scripts/same_bits.py > before.json
    python scripts/same_bits.py --compare before.json      # exit 1 if a model differs

A change that only moves code must leave all hashes as they are. Compare on one machine: others round differently. The hash
is over the tensors (type, shape, bytes), not over their names, so that a tensor may be renamed.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

from dpformer.data import demo_frame

USERS = 300
FITS = {
    "default": [],
    "dpformer": ["--preset", "dpformer"],
    "distilled": ["--preset", "distilled"],
    "paper": ["--preset", "paper"],
    "transitions": ["--preset", "transitions"],
    "popularity": ["--preset", "popularity"],
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--compare", type=Path, help="the output of an earlier call")
    arguments.add_argument("--only", nargs="*", choices=FITS, default=list(FITS))
    given = arguments.parse_args()
    hashes = fit_all(given.only)
    print(json.dumps(hashes, indent=2))
    if given.compare is not None:
        before = json.loads(given.compare.read_text())
        differ = [name for name in hashes if before.get(name) != hashes[name]]
        print(f"differ: {', '.join(differ) or 'none'}", file=sys.stderr)
        sys.exit(bool(differ))


def fit_all(names: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        frame = demo_frame()
        frame.filter(frame["user_id"].is_in(frame["user_id"].unique(maintain_order=True)[:USERS].implode())).write_csv(
            folder / "log.csv"
        )
        call("prepare", folder / "log.csv", "-o", folder / "data")
        for name in names:
            call("fit", folder / "data", "--run", folder / name, "--seed", "0", "--quiet", *FITS[name])
        return {name: model_hash(folder / name / "model.safetensors") for name in names}


def call(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "dpformer", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def model_hash(path: Path) -> str:
    hashes = []
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118
            array = file.get_tensor(name)
            hashes.append(hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest())
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()


if __name__ == "__main__":
    main()
