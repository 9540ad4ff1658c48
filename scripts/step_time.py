"""Compare the time of a DP-SGD step with that of another commit: same users drawn, same network, same settings.

    python scripts/step_time.py DATA 8e3cf82                     # DATA: a folder that `dpformer prepare` wrote
    python scripts/step_time.py DATA 8e3cf82 --setting bench --rounds 15 --threads 2

The other commit gets a work tree in a temporary folder. Two processes stay open, one per version, and make some steps in turn,
the first alternating. Printed: CPU seconds of a step (all threads; a busy machine disturbs it less than wall time), the ratio
of this version to the other in each round, the median of the ratios, and their quartiles and range. `--profile` prints what
this version spends its time on.
"""

import argparse
import contextlib
import cProfile
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# The network, the expected batch (a part of all users if below 1), and whether items are restricted to a vocabulary.
SETTINGS: dict[str, dict[str, Any]] = {
    "dpformer": {
        "batch": 0.25,
        "network": {"max_length": 200, "d": 32, "blocks": 1, "recency": 1.2, "vocabulary": 1000},
    },
    "bench": {"batch": 1024, "network": {"max_length": 200, "d": 64, "blocks": 2, "recency": None, "vocabulary": None}},
}
STEPS, EPSILON, DELTA, SIGMA = 2000, 1e6, 1e-5, 4.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("data", type=Path)
    arguments.add_argument("commit", nargs="?", default="8e3cf82")
    arguments.add_argument("--setting", choices=SETTINGS, default="dpformer")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--steps", type=int, default=2, help="per round and version")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.child:
        serve(Path(given.child), given.setting)
    elif given.profile:
        with tempfile.TemporaryDirectory() as folder:
            save_sequences(given.data, Path(folder) / "sequences.npz")
            profile(Path(folder) / "sequences.npz", given.setting, given.steps)
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, work_tree(given.commit, Path(folder)) as other:
        sequences = Path(folder) / "sequences.npz"
        save_sequences(given.data, sequences)
        versions = [Version(root, sequences, given) for root in (ROOT, other)]
        seconds: list[list[float]] = [[], []]
        for turn in range(given.rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                seconds[which].append(versions[which].steps(given.steps))
    ratios = [now / before for now, before in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    result = {
        "setting": given.setting,
        "commit": given.commit,
        "threads": given.threads,
        "rounds": given.rounds,
        "seconds_now": round(statistics.median(seconds[0]), 4),
        "seconds_before": round(statistics.median(seconds[1]), 4),
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    if given.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:15} {value}")


class Version:
    """A process with one version of the package, which makes steps on request."""

    def __init__(self, root: Path, sequences: Path, given: argparse.Namespace) -> None:
        threads = str(given.threads)
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": threads}
        words = [sys.executable, __file__, str(given.data), "--setting", given.setting, "--child", str(sequences)]
        self._process = subprocess.Popen(
            words, env=environment, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.steps(1)  # the first step also checks the network

    def steps(self, count: int) -> float:
        """CPU seconds of a step, the mean of `count`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def serve(sequences: Path, setting: str) -> None:
    make_step, answers = trainer(sequences, setting), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            start = time.process_time()
            for _ in range(int(line)):
                make_step()
            print((time.process_time() - start) / int(line), file=answers, flush=True)


def profile(sequences: Path, setting: str, steps: int) -> None:
    make_step = trainer(sequences, setting)
    make_step()
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.enable()
    for _ in range(steps):
        make_step()
    profiler.disable()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
    print(text.getvalue())


def trainer(sequences: Path, setting: str) -> Callable[[], Any]:
    """What makes a step, by the package that is imported here."""
    stored = np.load(sequences)
    items, offsets, catalogue = stored["items"], stored["offsets"], int(stored["catalogue"])
    users, chosen = len(offsets) - 1, SETTINGS[setting]
    batch = round(chosen["batch"] * users) if chosen["batch"] < 1 else chosen["batch"]
    people = {"users": np.arange(users), "items": items, "offsets": offsets}
    counts = np.bincount(items, minlength=catalogue + 1) + 1.0
    try:
        import dpformer.fit.dpsgd  # noqa: F401
    except ImportError:
        return old_trainer(people, catalogue, counts, batch, chosen["network"])
    return new_trainer(people, catalogue, counts, batch, chosen["network"])


def draws(users: int, rate: float) -> Iterator[np.ndarray]:
    """The users of each step, the same in both versions."""
    generator = np.random.default_rng(0)
    while True:
        yield np.flatnonzero(generator.random(users) < rate)


def new_trainer(people: dict[str, Any], items: int, counts: np.ndarray, batch: int, network: dict[str, Any]) -> Any:
    import polars as pl
    import torch

    from dpformer.data import Sequences
    from dpformer.fit.dpsgd import Optimisation, Trainer
    from dpformer.fit.recipe import NetworkSettings
    from dpformer.models import build
    from dpformer.privacy import Curator, Keys, PrivacyPlan, create_ledger

    users = len(people["users"])
    plan = PrivacyPlan(users, batch, STEPS, EPSILON, DELTA, SIGMA)
    torch.manual_seed(0)
    settings = NetworkSettings(**network)
    model = build(settings.spec(items))
    model.choose(torch.from_numpy(counts).float(), bias=settings.vocabulary is not None)
    trainer = Trainer(model, plan, Optimisation(max_length=settings.max_length))
    drawn = draws(users, plan.rate)
    curator = Curator(
        Sequences(pl.Series(people["users"]), people["items"], people["offsets"]),
        plan,
        create_ledger(tempfile.mkdtemp(), plan),
        Keys(0),
        draw=lambda key, count, rate: next(drawn),
    )
    return lambda: trainer.make_step(curator)


def old_trainer(people: dict[str, Any], items: int, counts: np.ndarray, batch: int, network: dict[str, Any]) -> Any:
    """By the classes of 8e3cf82."""
    import polars as pl
    import torch
    from dpformer.training.recipe import Recipe
    from dpformer.training.trainer import Trainer

    from dpformer.data import Sequences
    from dpformer.privacy import PrivacyPlan, create_ledger
    from dpformer.privacy.noise import noise_source

    users = len(people["users"])
    plan = PrivacyPlan(users, batch, STEPS, EPSILON, DELTA, SIGMA)
    torch.manual_seed(0)
    biased = network["vocabulary"] is not None
    recipe = Recipe(
        **network,
        identity=network["recency"] is not None,
        popularity_bias=biased,
        averaging="none",
        histogram_share=0.03,
        learning_rate=1e-2,
    )
    model, drawn = recipe.build(items), draws(users, plan.rate)

    class Sampler:
        seeded = True
        rate = plan.rate

        def __init__(self) -> None:
            self.users = users

        def draw(self) -> np.ndarray:
            return next(drawn)

    sequences = Sequences(pl.Series(people["users"]), people["items"], people["offsets"])
    noise = noise_source("seeded", 0)
    trainer = Trainer(
        model, sequences, plan, recipe.optimisation(), Sampler(), noise, create_ledger(tempfile.mkdtemp(), plan)
    )
    trainer.choose(torch.from_numpy(counts).float(), bias=biased)
    return trainer.make_step


def save_sequences(data: Path, path: Path) -> None:
    from dpformer.data import load

    dataset = load(data)
    people = dataset.train("validation")
    np.savez(path, items=people.items, offsets=people.offsets, catalogue=len(dataset.catalogue))


@contextlib.contextmanager
def work_tree(commit: str, folder: Path) -> Iterator[Path]:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(ROOT), "worktree", *words], check=True, stdout=subprocess.DEVNULL)

    path = folder / "other"
    git("add", "--detach", "--force", str(path), commit)
    try:
        yield path
    finally:
        git("remove", "--force", str(path))


if __name__ == "__main__":
    main()
