"""What can be set of the DP transition statistics. The defaults were chosen on the validation item of two data sets."""

import math
from dataclasses import dataclass, field

from dpformer.errors import PrivacyError

HEAD_AT_1, LARGEST_HEAD = 1060, 3000
# Up to so many people the size of the head does not depend on their number; measured on 6,000 to 600,000 (docs/statistics.md).
FEW_USERS = 60_000


@dataclass(frozen=True)
class Mix:
    """The weights of the parts of the score matrix (see `score_matrix.score_matrix`); T stands for transposed."""

    lift: float = 1.0
    lift_by_rank: float = 0.5
    excess_4: float = 0.1
    excess_2: float = 0.2
    lift_t: float = 0.3
    excess_4_t: float = 0.05


@dataclass(frozen=True)
class TransitionSettings:
    """Shares of the budget, the shape of the queries, and the post-processing.

    head                how many of the most frequent items (by the noisy histogram) have transitions; None: `head_size`
    stage_shares        the parts of the transition answers, one after the other, in proportion
    thresholds          the z-score that a cell must exceed to be asked again, for each release but the first
    last                a user's events that are looked at, from the end
    lags, lag_power     a pair of items k <= lags events apart counts k^-lag_power
    cell_power          cells are weighted by (h_i h_j)^-cell_power, h being the items' noisy counts
    rank, ridge, folds  the low-rank prediction of each cell from the others
    prior_counts        the log-lift of x over an expected P is log (x + prior_counts P + prior_noise s) -
    prior_noise         log (P + prior_counts P + prior_noise s), s being the first stage's noise
    mix                 weights of the parts of the score matrix
    conditional         weight of the conditional probabilities in the score matrix; None: chosen on the answers
    window              items of the history that count, the k-th to last with weight 1 / k
    popularity          weight of log h in the score
    """

    head: int | None = None
    stage_shares: tuple[float, ...] = (0.45, 0.22, 0.30)
    thresholds: tuple[float, ...] = (0.4, 0.7)
    last: int = 2000
    lags: int = 15
    lag_power: float = 0.8
    cell_power: float = 0.1
    rank: int = 32
    ridge: float = 30.0
    folds: int = 10
    prior_counts: float = 0.3
    prior_noise: float = 0.5
    mix: Mix = field(default_factory=Mix)
    conditional: float | None = None
    window: int = 15
    popularity: float = 0.1

    def __post_init__(self) -> None:
        for name in ("head", "last", "lags", "rank", "window"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise PrivacyError(f"{name} = {getattr(self, name)} of the transition statistics is not at least 1")
        if not abs(self.cell_power) <= 1:
            raise PrivacyError(
                f"cell_power = {self.cell_power:g} is not between -1 and 1; weights would leave the numbers"
            )
        if self.folds < 2:
            raise PrivacyError(f"folds = {self.folds}: a cell is predicted from other cells only with 2 folds or more")
        if not self.stage_shares or min(self.stage_shares) <= 0:
            raise PrivacyError(f"the shares {self.stage_shares} of the transition answers must be above 0")
        if len(self.thresholds) != len(self.stage_shares) - 1:
            raise PrivacyError(
                f"{len(self.stage_shares)} transition releases need {len(self.stage_shares) - 1} thresholds, "
                f"not {len(self.thresholds)}: one for each but the first"
            )

    @classmethod
    def one_stage(cls) -> "TransitionSettings":
        """A single transition release: simpler, and a little less accurate."""
        return cls(stage_shares=(0.97,), thresholds=())

    def head_size(self, noise_multiplier: float, users: int) -> int:
        """How many items have transitions: `head`, or else 1,060 sqrt(max(1, users / 60,000) / noise multiplier), 3,000 at most.

        With less noise, or more people, transitions of rarer items stand out from it. Both are public, so the number reveals
        nothing. The bound limits memory: matrices have this many rows and columns.
        """
        if self.head is not None:
            return self.head
        size = HEAD_AT_1 * math.sqrt(max(1.0, users / FEW_USERS) / noise_multiplier)
        return min(max(1, round(size)), LARGEST_HEAD)

    def shares(self, share: float) -> dict[str, float]:
        """The name and the part of the budget of each transition answer, in this order, if all of them have `share`.

        >>> TransitionSettings().shares(0.97)
        {'transitions 1': 0.45, 'transitions 2': 0.22, 'transitions 3': 0.3}
        """
        total = sum(self.stage_shares)
        return {stage_name(stage): share * own / total for stage, own in enumerate(self.stage_shares)}


def stage_name(stage: int) -> str:
    """The name of a transition release; the first is stage 0."""
    return f"transitions {stage + 1}"
