"""The best attack of all, over hundreds of releases: a likelihood-ratio test finds what the closed form says, and no more.

The attacker is given the answers themselves, and knows them under both hypotheses but for the noise. Between N(0, s^2 I) and
N(v, s^2 I) with |v| = 1 the best test is right with probability Phi(1 / (2 s)) when a fair coin decides (Neyman and Pearson).
Tolerances are binomial, with a false alarm in a million runs.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.data import Sequences, demo_frame, prepare
from dpformer.privacy import Answer, Curator, Keys, PrivacyPlan, Sample, create_ledger, make_plan
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.query import Query
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from dpformer.statistics.settings import TransitionSettings
from tests.attacks.folders import emptied, least_right, most_right, phi
from tests.statistics.fits import all_shares, measure_all

RELEASES = 400
FEW = TransitionSettings(head=25)


@pytest.fixture(scope="module")
def people() -> Sequences:
    log = demo_frame()
    return prepare(log.filter(log["user_id"] < "reader-0100")).train("validation")


def half_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    return rounded_gaussian(key, shape, std / 2)


class Judge:
    """Stands between the one who asks and the Curator: adds up the logarithm of the likelihood ratio of all answers.

    A query may depend on earlier answers: the attacker has heard them too, and knows what the target would add to it.
    """

    def __init__(self, curator: Curator[Sequences], alone: Sequences, others: Sequences) -> None:
        self._curator, self._alone, self._others = curator, alone, others
        self.ratio = 0.0

    def ask(self, query: Query[Sequences]) -> Answer:
        answer = self._curator.ask(query)
        everybody = Sample(np.arange(len(self._alone)), b"")
        std = answer.noise_std / answer.grid
        for name, values in answer.values.items():
            mine = query.sum(self._alone, everybody, answer.grid)[name].astype(float)
            rest = values / answer.grid - query.sum(self._others, everybody, answer.grid)[name]
            self.ratio += float((rest * mine).sum() - (mine * mine).sum() / 2) / std**2
        return answer


def games(
    people: Sequences, plan: PrivacyPlan, folder: Path, ask: Callable[[Judge], Any], **curator: Any
) -> Iterator[bool]:
    """Whether the attacker is right, for one release after the other, each with a coin and keys of its own."""
    # The target is the one with the longest history, so that every query has a vector of norm 1.
    target = int(people.lengths.argmax())
    others = emptied(people, np.array([target]))
    alone = emptied(people, np.delete(np.arange(len(people)), target))
    coins = np.random.default_rng(5).random(RELEASES) < 0.5
    for k, member in enumerate(coins):
        with create_ledger(folder / str(k), plan) as ledger:
            judge = Judge(Curator(people if member else others, plan, ledger, Keys(), **curator), alone, others)
            ask(judge)
        yield (judge.ratio > 0) == member


def ask_histogram(items: int, judge: Judge) -> None:
    judge.ask(Histogram(items, name=HISTOGRAM))


def ask_all(items: int, judge: Judge) -> None:
    """All that the default preset asks, in its order, over a small head."""
    measure_all(judge, items, FEW)


CASES = pytest.mark.parametrize(
    ("ask", "shares"),
    [(ask_histogram, {HISTOGRAM: 1.0}), (ask_all, all_shares(FEW))],
    ids=["histogram", "default preset"],
)


@CASES
def test_it_finds_what_the_closed_form_says(
    ask: Any, shares: dict[str, float], people: Sequences, tmp_path: Path
) -> None:
    plan = make_plan(len(people), 8.0, shares=shares)
    sigma = 1 / math.sqrt(sum(release.noise_multiplier**-2 for release in plan.releases))
    found = sum(games(people, plan, tmp_path, partial(ask, 500)))
    low, high = least_right(RELEASES, phi(0.5 / sigma)), most_right(RELEASES, phi(0.5 / sigma))
    assert low <= found <= high, f"right {found} times of {RELEASES}; the closed form gives {phi(0.5 / sigma):.3f}"


@CASES
def test_half_the_noise_is_noticed(ask: Any, shares: dict[str, float], people: Sequences, tmp_path: Path) -> None:
    plan = make_plan(len(people), 8.0, shares=shares)
    sigma = 1 / math.sqrt(sum(release.noise_multiplier**-2 for release in plan.releases))
    found = sum(games(people, plan, tmp_path, partial(ask, 500), noise=half_noise))
    high = most_right(RELEASES, phi(0.5 / sigma))
    assert found > high, f"right {found} times of {RELEASES}, and {high} are allowed"
