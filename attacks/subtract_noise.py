"""Was the first person in the data? By making the noise again, if its seed is known.

    python attacks/subtract_noise.py RUN DATA [SEED]        a run folder with its answers/, and the prepared data

A seeded run has its seed in config.json. The attacker makes the histogram's answer with that seed, with the person and
without.
One of the two is the released answer to the last bit. Without a seed (the default of `dpformer fit`) the noise comes from the
operating system, its key is deleted, and no guess of a seed fits.
"""

import sys
from pathlib import Path

from dpformer.data import load
from dpformer.fit.folder import read_recipe
from dpformer.privacy import Curator, Keys, read_ledger
from dpformer.privacy.replay import read_answers
from dpformer.statistics.histogram import Histogram
from dpformer.trust.verify.people import emptied
from dpformer.trust.verify.recorder import ledger_at

GUESSES = 50


def main(run: Path, data: Path, seed: int | None = None) -> None:
    """Try the seed of the folder, a given one, or the first few."""
    recipe, plan = read_recipe(run), read_ledger(run).plan
    people, answer = load(data).train(recipe.hold_out), read_answers(run / "answers")[1][0]
    items = len(answer.values["histogram"]) - 1
    known = recipe.seed if seed is None else seed
    for guess in range(GUESSES) if known is None else [known]:
        for word, who in (("in", people), ("out", emptied(people, [0]))):
            curator = Curator(who, plan, ledger_at(plan, 0), Keys(guess))
            if (curator.ask(Histogram(items)).values["histogram"] == answer.values["histogram"]).all():
                print(f"seed {guess}: the first person was {word}, with certainty")
                return
    print(f"no seed in the folder; {GUESSES} guesses do not fit" if known is None else f"seed {known} does not fit")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *(int(given) for given in sys.argv[3:4]))
