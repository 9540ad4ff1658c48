"""Was this person in the data? By the last bits of the released histogram, if the noise leaves them.

    python attacks/floating_point.py RUN DATA        a run folder with its answers/, and the prepared data that it was made of

The attacker knows everybody's history and does not know who of them is in. For each of 40 people: what do all others add to the
person's items? If the noise cannot lead from there to the released number, the person was in; if it cannot lead there from the
sum with the person, the person was out. One number is enough, whatever epsilon is.

The same sums are released once more with the noise of the versions before the grid: float32 Gaussians, added in float64.
"""

import sys
from pathlib import Path

import numpy as np

from dpformer.data import load
from dpformer.fit.folder import read_recipe
from dpformer.privacy.replay import read_answers
from dpformer.statistics.histogram import Histogram

PEOPLE = 40


def main(run: Path, data: Path) -> None:
    """Attack the folder, then the old noise on the same sums."""
    people = load(data).train(read_recipe(run).hold_out)
    answer = next(one for one in read_answers(run / "answers")[1] if one.name == "histogram")
    seen, std, grid = answer.values["histogram"], answer.noise_std, answer.grid
    person, cell, value = next(Histogram(len(seen) - 1).vectors(people))
    sums = np.bincount(cell, weights=value, minlength=len(seen))
    old = sums + std * np.random.default_rng(0).standard_normal(len(sums), dtype=np.float32).astype(np.float64)
    steps = np.trunc(value / grid) * grid
    whole = np.bincount(cell, weights=steps, minlength=len(seen))

    def in_float32(noise: np.ndarray) -> bool:
        z = noise / std
        return bool((np.abs(z - z.astype(np.float32)) < 1e-12 * (1 + np.abs(z))).all())

    def on_the_grid(noise: np.ndarray) -> bool:
        return bool((noise / grid == np.rint(noise / grid)).all())

    verdicts: dict[str, list[str]] = {"this folder": [], "the old noise": []}
    for k in range(min(PEOPLE, len(people))):
        mine = cell[person == k]
        for name, released, total, own, can_be in (
            ("this folder", seen, whole, steps[person == k], on_the_grid),
            ("the old noise", old, sums, value[person == k], in_float32),
        ):
            was_in, was_out = can_be(released[mine] - total[mine]), can_be(released[mine] - (total[mine] - own))
            verdicts[name].append("cannot tell" if was_in == was_out else "in" if was_in else "out")
    for name, said in verdicts.items():
        print(f"{name}: in {said.count('in')}, out {said.count('out')}, cannot tell {said.count('cannot tell')}")


if __name__ == "__main__":
    main(*(Path(given) for given in sys.argv[1:3]))
