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

**Floating point.** See `floating`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import norm, rankdata
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.data import Sequences
from dpformer.fit.gradient_sum import GradientSum
from dpformer.models import Ensemble, Popularity, Recommender, TransitionScorer
from dpformer.privacy import Answer, Query
from dpformer.privacy.query import Statistic
from dpformer.privacy.replay import Replay
from dpformer.trust.audit.floating import Float32Noise, GridNoise, possible, tell_apart
from dpformer.trust.verify.clipping import factors
from dpformer.trust.verify.network import losses_of, tokens_of

# Weight k^-0.8 of items k apart, as the transitions count them.
LAG_POWER = 0.8
_STEP = 1e-3  # of the central difference, over the length of the answer


class Attacker(Replay):
    """Gives a folder's answers again, and attacks each. inside: the coins, for the attack that knows all others'.

    ratio: float64 [m], the log-likelihood ratio of each canary. told: by floating point, see `tell_apart`. before: how much the
    network before the first step likes each canary, see `liked`; 0 without steps.
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
        if isinstance(query, Statistic):
            person, cell, value = (np.concatenate(part) for part in zip(*query.vectors(self.canaries), strict=True))
            seen = answer.values[query.name].ravel()
            self._likelihood(seen, person, cell, value, answer.noise_std)
            self._floating(seen, person, cell, value, answer)
        elif isinstance(query, GradientSum):
            if self.before is None:
                self.before = liked(copy.deepcopy(query.team.first.model).eval(), self.canaries)
            x, size = _along(query, answer, self.canaries, self._rate)
            slope = (x - size**2 / 2) / answer.noise_std**2
            self.ratio += np.logaddexp(np.log1p(-self._rate) if self._rate < 1 else -np.inf, np.log(self._rate) + slope)
        return answer

    def _likelihood(
        self, seen: np.ndarray, person: np.ndarray, cell: np.ndarray, value: np.ndarray, std: float
    ) -> None:
        # Half of all canaries, the own one included: that half is the |v|^2 / 2.
        expected = np.bincount(cell, weights=value, minlength=len(seen)) / 2
        along = np.bincount(person, weights=value * (seen - expected)[cell], minlength=len(self.canaries))
        self.ratio += along / std**2

    def _floating(
        self, seen: np.ndarray, person: np.ndarray, cell: np.ndarray, value: np.ndarray, answer: Answer
    ) -> None:
        self.told = first(self.told, told_apart(seen, person, cell, value, self._inside, answer.noise_std, None))
        if answer.grid:
            told = told_apart(seen, person, cell, value, self._inside, answer.noise_std, answer.grid)
            self.told = first(self.told, told)


def first(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What a says, and b where a cannot tell."""
    return np.where(a == 0, b, a)


def told_apart(
    seen: np.ndarray,
    person: np.ndarray,
    cell: np.ndarray,
    value: np.ndarray,
    inside: np.ndarray,
    std: float,
    grid: float | None,
) -> np.ndarray:
    """The floating-point attack on an answer: as noise in float32, or with a grid as whole steps of it."""
    noise: Any = Float32Noise(std) if grid is None else GridNoise(grid)
    value = value if grid is None else np.trunc(value / grid) * grid
    total = np.bincount(cell, weights=value * inside[person], minlength=len(seen))[cell]
    others = total - value * inside[person]
    fits = [possible(seen[cell], c, noise) for c in (others + value, others)]
    missed = [np.bincount(person, weights=~one, minlength=len(inside)) for one in fits]
    return np.where(np.bincount(person, minlength=len(inside)) > 0, tell_apart(missed[0] == 0, missed[1] == 0), 0)


def _along(query: GradientSum, answer: Answer, canaries: Sequences, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """<Y - E, v_i> and |v_i| of each canary: the derivative of its loss along Y - E, times its clip factor."""
    worker = query.team.first
    clip = worker.clipping
    assert clip is not None
    model = copy.deepcopy(worker.model).double().eval()
    tokens, losses = tokens_of(canaries, canaries.lengths.max(), model), losses_of(worker)
    pass_ = PhantomClipping(model, clip.clip.max_norm, clip.clip.rule)
    norms = pass_.norms(lambda: losses(model, tokens))
    weights = factors(norms, clip.clip.max_norm, clip.clip.rule)
    for p in model.parameters():
        p.grad = None
    pass_.weighted_sum(lambda: losses(model, tokens), weights)
    named = dict(model.named_parameters())
    rest: dict[str, Tensor] = {}
    for name, value in answer.values.items():
        all_canaries = named[name].grad
        assert all_canaries is not None
        rest[name] = torch.from_numpy(value).double() - rate / 2 * all_canaries
    length = float(torch.sqrt(sum((v**2).sum() for v in rest.values())))  # type: ignore[arg-type]
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
