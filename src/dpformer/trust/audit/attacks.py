"""The attacks on a folder. They know everything but the coins: all histories, all settings, all answers, all tensors.

**Likelihood.** An answer is Y = sum_j b_j v_j + s N(0, I), with b_j the coin and v_j the vector of canary j, which public
settings and earlier answers give. No test of b_i is better than the likelihood ratio

    log p(Y | b_i = 1) / p(Y | b_i = 0)  =  x_i / s^2,     x_i = <Y - E, v_i> - |v_i|^2 / 2,

with E what the others are expected to add, (1/2) sum_(j != i) v_j: their coins are unknown, and hardly matter, as their cells are
others. In a step each person is drawn with rate q, so E has q / 2, and the ratio is log(1 - q + q exp(x_i / s^2)). Ratios of
answers add up.

**Published model.** Without the answers. Where steps were made: how much more than the network before the first step, which
settings and seed give, the published model likes each canary's own next items. Else the score matrix along each canary's cells,
each row replaced by the normal quantiles of its ranks: a score is an unknown rising function of the noisy count.

**Floating point.** A released number is c + n, perhaps rounded to float32: c what all others add, and the target or not; n the
noise. The attacker knows c under both hypotheses. If no value that the noise can take leads from c to what was released, the
hypothesis is refuted, with certainty and by a single number. Noise that can be any step of a grid, with sums that are whole steps
of the same grid, refutes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import norm, rankdata

from dpformer.clipping import PhantomClipping
from dpformer.data import Sequences
from dpformer.fit.gradient_sum import GradientSum
from dpformer.models import Ensemble, Popularity, Recommender, TransitionScorer
from dpformer.privacy import Answer, Query
from dpformer.privacy.query import Statistic
from dpformer.privacy.replay import Replay
from dpformer.trust.verify.clipping import factors
from dpformer.trust.verify.network import losses_of, tokens_of

# Weight k^-0.8 of items k apart, as the transitions count them.
LAG_POWER = 0.8
_STEP = 1e-3  # of the central difference, over the length of the answer


class Attacker(Replay):
    """Gives a folder's answers again, and attacks each. inside: the coins, for the attack that knows all others'.

    ratio: float64 [m], the log-likelihood ratio of each canary. told: by floating point, see `Entries.told_apart`. before: how
    much the network before the first step likes each canary, see `liked`; None without steps.
    """

    def __init__(self, answers: Sequence[Answer], canaries: Sequences, inside: np.ndarray, rate: float) -> None:
        super().__init__(answers)
        self.canaries, self._inside, self._rate = canaries, inside, rate
        self.ratio = np.zeros(len(canaries))
        self.told = np.zeros(len(canaries), dtype=np.int64)
        self.before: np.ndarray | None = None

    def ask(self, query: Query[Any]) -> Answer:
        """The recorded answer."""
        answer = super().ask(query)
        std = answer.noise_std
        if isinstance(query, Statistic):
            person, cell, value = (np.concatenate(part) for part in zip(*query.vectors(self.canaries), strict=True))
            entries = Entries(answer.values[query.name].ravel(), person, cell, value, self._inside)
            self.ratio += entries.along_noise() / std**2
            self.told = first(self.told, entries.told_apart(std, answer.grid))
        elif isinstance(query, GradientSum):
            if self.before is None:
                self.before = liked(copy.deepcopy(query.team.first.model).eval(), self.canaries)
            x, size = _along(query, answer, self.canaries, self._rate)
            slope = (x - size**2 / 2) / std**2
            out = np.log1p(-self._rate) if self._rate < 1 else -np.inf
            self.ratio += np.logaddexp(out, np.log(self._rate) + slope)
        return answer


@dataclass(frozen=True)
class Entries:
    """The numbers that were seen, and the entries of all canaries' vectors: whose, in which number, how much. inside: coins."""

    seen: np.ndarray
    person: np.ndarray
    cell: np.ndarray
    value: np.ndarray
    inside: np.ndarray

    def along_noise(self) -> np.ndarray:
        """x_i of each canary, `[m]`: half of all canaries are expected, the own one included; that half is the |v|^2 / 2."""
        expected = np.bincount(self.cell, weights=self.value, minlength=len(self.seen)) / 2
        return self._sum(self.value * (self.seen - expected)[self.cell])

    def told_apart(self, std: float, grid: float) -> np.ndarray:
        """1: in, -1: out, 0: cannot tell, by noise in float32; where that cannot tell and there is a grid, by its steps."""
        told = self._told_apart(Float32Noise(std), self.value)
        return first(told, self._told_apart(GridNoise(grid), np.trunc(self.value / grid) * grid)) if grid else told

    def _told_apart(self, noise: Float32Noise | GridNoise, value: np.ndarray) -> np.ndarray:
        added = value * self.inside[self.person]
        others = np.bincount(self.cell, weights=added, minlength=len(self.seen))[self.cell] - added
        in_fits, out_fits = (
            self._sum(~possible(self.seen[self.cell], c, noise)) == 0 for c in (others + value, others)
        )
        has_entries = self._sum(np.ones(len(value))) > 0
        return np.where(has_entries, in_fits.astype(np.int64) - out_fits.astype(np.int64), 0)

    def _sum(self, weights: np.ndarray) -> np.ndarray:
        return np.bincount(self.person, weights=weights, minlength=len(self.inside))


def first(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What a says, and b where a cannot tell."""
    return np.where(a == 0, b, a)


class Float32Noise:
    """std times a float32."""

    def __init__(self, std: float) -> None:
        self.std = std

    def at_least(self, low: np.ndarray) -> np.ndarray:
        """The least value from `low` on."""
        z = (low / self.std).astype(np.float32)
        above = np.nextafter(z, np.float32(np.inf))
        return self.std * np.where(z.astype(np.float64) < low / self.std, above, z).astype(np.float64)


class GridNoise:
    """Whole steps of a grid."""

    def __init__(self, grid: float) -> None:
        self.grid = grid

    def at_least(self, low: np.ndarray) -> np.ndarray:
        """The least value from `low` on."""
        return np.ceil(low / self.grid) * self.grid


def possible(seen: np.ndarray, c: np.ndarray, noise: Float32Noise | GridNoise) -> np.ndarray:
    """Whether each number can be c plus a value of the noise, rounded to the type that it is seen in."""
    exact = seen.astype(np.float64)
    # Half a step of the type; in float64 the sums are known up to the order in which they were added.
    room = 0.51 * np.spacing(np.abs(seen)).astype(np.float64) if seen.dtype == np.float32 else 1e-12 * (1 + abs(exact))
    return noise.at_least(exact - room - c) <= exact + room - c


def _along(query: GradientSum, answer: Answer, canaries: Sequences, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """<Y - E, v_i> and |v_i| of each canary: the derivative of its loss along Y - E, times its clip factor."""
    worker = query.team.first
    clip = worker.clipping
    assert clip is not None
    model = copy.deepcopy(worker.model).double().eval()
    tokens, losses = tokens_of(canaries, canaries.lengths.max(), model), losses_of(worker)
    pass_ = PhantomClipping(model, clip.clip.max_norm, clip.clip.rule, scales=clip.scales)
    norms = pass_.norms(lambda: losses(model, tokens))
    weights = factors(norms, clip.clip.max_norm, clip.clip.rule)
    model.zero_grad(set_to_none=True)
    pass_.weighted_sum(lambda: losses(model, tokens), weights)
    named = dict(model.named_parameters())
    rest = {}
    for name, value in answer.values.items():
        all_canaries = named[name].grad
        assert all_canaries is not None
        # v_i is scaled: <Y - E, v_i> is the derivative along the scaled direction.
        rest[name] = (torch.from_numpy(value).double() - rate / 2 * all_canaries) * clip.scales.get(name, 1.0)
    length = float(torch.cat([value.flatten() for value in rest.values()]).norm())
    ends = []
    with torch.no_grad():
        for sign in (1, -2):  # theta + h G / |G|, then theta - h G / |G|
            for name, value in rest.items():
                named[name].add_(value, alpha=sign * _STEP / length)
            ends.append(losses(model, tokens).double())
    size = (norms * weights).numpy()
    along = ((ends[0] - ends[1]) * length / (2 * _STEP) * weights).numpy()
    return along + rate / 2 * size**2, size


def published_scores(model: Recommender, canaries: Sequences, before: np.ndarray | None) -> np.ndarray:
    """What speaks for each canary in a published model, `[m]`. before: see `Attacker`."""
    if isinstance(model, Popularity):
        counts = model.counts.double().numpy()
        return np.array([float(counts[one].mean()) for one in canaries])
    if before is not None:
        return liked(model, canaries) - before
    transitions = model.transitions if isinstance(model, Ensemble) else model
    assert isinstance(transitions, TransitionScorer)
    return along_cells(transitions, canaries)


def liked(model: Recommender, canaries: Sequences) -> np.ndarray:
    """How much more than the average item a model likes each canary's own items, `[m]`."""
    rows = np.stack(list(canaries))
    total = np.zeros(len(rows))
    for t in range(1, rows.shape[1]):
        history = torch.from_numpy(rows[:, :t].astype(np.int64))
        scores = model.scores(history, torch.full((len(rows),), t)).double().numpy()
        usual = np.mean(scores[:, 1:], 1, where=np.isfinite(scores[:, 1:]))
        total += scores[np.arange(len(rows)), rows[:, t]] - usual
    return total


def along_cells(model: TransitionScorer, canaries: Sequences) -> np.ndarray:
    """Sum over the pairs of items of each canary, k apart, of k^-0.8 times the normal quantile of the score's rank in its row."""
    size = model.spec.head
    matrix, place = model.matrix[:-1].double().numpy(), np.full(model.spec.items + 1, size)
    place[model.head.numpy()] = np.arange(size)
    np.fill_diagonal(matrix, -np.inf)
    quantile = np.zeros((size + 1, size + 1))  # 0 outside of the head
    quantile[:size, :size] = norm.ppf(rankdata(matrix, axis=1) / (size + 1))
    rows = place[np.stack(list(canaries))]
    total = np.zeros(len(rows))
    for k in range(1, rows.shape[1]):
        total += k**-LAG_POWER * quantile[rows[:, :-k], rows[:, k:]].sum(1)
    return total
