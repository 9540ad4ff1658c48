"""The clipped sum of a step, as a query.

    sum over the people drawn of c_i g_i        in whole steps of the grid

Gradients exist only as float32 sums of some people, and rounding in a float32 sum depends on who else is in it. So people are
divided into groups by their place alone: place // block. The sum of a group is rounded to the grid as whole numbers, and groups
are added as whole numbers, in any order, by any worker or process. One person's events touch the sum of one group only, so

    sensitivity = C / g (1 + 1e-6 + m 2^-21) + sqrt(d)        in grid steps g, for d numbers

where m is the largest number of people drawn from a group. 1e-6 is the clipping's own slack. sqrt(d) is a proof: rounding moves
each number of one group's sum by half a step, with the person and without. m 2^-21 is an assumption: it stands for all that the
person's leaving can change in the float32 arithmetic of the others in the group; no bound on it is known beforehand, and
`verify` measures it.

The shape in which a person is computed, in a micro-batch and in a tile of the head, depends on that person's length alone
(`data.batches`, `clipping.tiles`). Else a long person who leaves would change the padding of others; those who are alike would
all round the same other way, and their differences would add up. Which worker or process has a group is a matter of speed alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dpformer.clipping.tiles import row_budget
from dpformer.data import MicroBatch, Sequences, micro_batches
from dpformer.errors import PrivacyError
from dpformer.fit.workers import Team
from dpformer.models import Network
from dpformer.models.dropout import is_random
from dpformer.privacy import Sample
from dpformer.privacy.noise import kept_by_dropout
from dpformer.privacy.plan import GRADIENTS

CLIP_SLACK = 1e-6
# What float32 can change for one person of a group when another leaves, relative to C. Measured: docs/privacy.md.
FLOAT32_SLACK = 2.0**-21
# Groups of a batch, as far as the people expected in one allow: enough for workers and processes to share, few enough to keep
# micro-batches full (`dpformer bench grouping`). An even number, for two workers. 4,096 people expected are at most 4,768 drawn:
# a slack of 0.23 %.
_GROUPS, _SMALLEST, _LARGEST = 4, 512, 4096


@dataclass(frozen=True)
class Groups:
    """People by their places: group k holds the places k block .. (k + 1) block - 1. `most` of it are drawn at the most."""

    block: int
    most: int

    @classmethod
    def of(cls, users: int, rate: float) -> Groups:
        """Groups for a population and a sampling rate, which are public: nothing here depends on anybody's events.

        Of mu people expected, mu + x are drawn with probability exp(-x^2 / (2 mu + 2 x / 3)) at the most (Bernstein); with
        x = 10 sqrt(mu) + 32 that is below 1e-21.
        """
        batch = users * rate
        size = min(max(batch / _GROUPS, _SMALLEST), _LARGEST)
        count = 2 * math.ceil(batch / size / 2)
        block = math.ceil(users / count)
        expected = block * rate
        return cls(block, min(block, math.ceil(expected + 10 * math.sqrt(expected) + 32)))

    def split(self, drawn: np.ndarray) -> dict[int, np.ndarray]:
        """The people drawn (places, ascending), by group; groups nobody was drawn from are left out."""
        number = drawn // self.block
        starts = np.flatnonzero(np.diff(number, prepend=-1))
        parts = np.split(drawn, starts[1:]) if len(drawn) else []
        if any(len(part) > self.most for part in parts):
            raise PrivacyError(f"more than {self.most} people were drawn from one group; the sampler is not the plan's")
        return {int(part[0]) // self.block: part for part in parts}


@dataclass(frozen=True)
class Budget:
    """How much a micro-batch may hold: items of a history, positions with padding, rows of the head, columns of the table."""

    max_length: int
    tokens: int
    rows: int
    columns: int


class PersonMasks:
    """Dropout masks of a micro-batch by a cipher: each person's is a function of step and person alone; see `models.dropout`."""

    def __init__(self, key: bytes, users: np.ndarray) -> None:
        self._key, self._users, self._calls = key, users, 0

    def __call__(self, shape: tuple[int, ...], rate: float) -> torch.Tensor:
        """The factors of the next call, [B, ...]."""
        if shape[0] != len(self._users):
            raise PrivacyError(
                f"dropout on {shape[0]} samples in a micro-batch of {len(self._users)} people; it is refused"
            )
        count = math.prod(shape[1:])
        kept = np.stack([kept_by_dropout(self._key, int(user), self._calls, count, rate) for user in self._users])
        self._calls += 1
        return torch.from_numpy(kept.reshape(shape)).float() / (1 - rate)


@dataclass
class Report:
    """What the last sum tells the one who runs it. Computed on private data without noise: never released."""

    users: int = 0
    loss: float = 0.0
    nonfinite: int = 0


class GradientSum:
    """The clipped sum of a network's gradients over the people drawn. See `privacy.query.Query`.

    `team` has the network and, unless it trains without privacy, its clipping.
    """

    name = GRADIENTS
    processes = 1  # that share the groups of a batch

    def __init__(self, team: Team, groups: Groups, max_length: int, token_budget: int) -> None:
        self.team, self.groups = team, groups
        self._max_length, self._token_budget = max_length + 1, token_budget
        self._numbered: tuple[Sequences, Sequences] | None = None
        self.report = Report()

    @property
    def model(self) -> Network:
        """The network."""
        return self.team.first.model

    @property
    def bound(self) -> float:
        """The clipping norm C; 1 without clipping, where no noise is added."""
        clipping = self.team.first.clipping
        return 1.0 if clipping is None else clipping.clip.max_norm

    @property
    def numbers(self) -> int:
        """How many numbers the network learns."""
        return sum(p.numel() for p in self.model.parameters())

    def sensitivity(self, grid: float) -> float:
        """C / g (1 + 1e-6 + m 2^-21) + sqrt(d)."""
        return clipped_sensitivity(self.bound, self.groups.most, self.numbers, grid)

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """int64 sums by the parameters' names."""
        return self.sum_groups(people, self.groups.split(sample.drawn), grid, sample.key)

    def sum_groups(
        self, people: Sequences, groups: Mapping[int, np.ndarray], grid: float, key: bytes
    ) -> dict[str, np.ndarray]:
        """The sum over some groups of people, by their numbers."""
        check_precision(self.model)
        check_dropout(self.model)
        users = sum(len(part) for part in groups.values())
        if self.team.first.clipping is not None:
            check_room(users, self.bound, grid)
        rows = self._rows(people)
        budget = self._budget()
        # Which worker has a group depends on its number alone.
        parts: list[list[Iterator[MicroBatch]]] = [[] for _ in range(self.team.size)]
        for number, part in groups.items():
            # A person with less than a pair of items adds nothing, and is drawn all the same.
            paired = part[rows.lengths[part] > 1]
            if len(paired):
                parts[number // self.processes % self.team.size].append(_cut(rows, paired, budget))
        masks = (lambda users: PersonMasks(key, users)) if is_random(self.model) else None
        totals, loss, nonfinite = self.team.sum(parts, grid, masks)
        self.report = Report(users, loss, nonfinite)
        return whole_sums([name for name, _ in self.model.named_parameters()], totals)

    def _rows(self, people: Sequences) -> Sequences:
        """Each person's items that the network knows, by their rows: a matter of each person alone."""
        if self.model.chosen is None:
            return people
        if self._numbered is None or self._numbered[0] is not people:
            self._numbered = (people, people.renumbered(self.model.places().numpy()))
        return self._numbered[1]

    def forget_vocabulary(self) -> None:
        """The network has chosen another vocabulary."""
        self._numbered = None

    def _budget(self) -> Budget:
        # The head keeps a row of the catalogue's width for each token; of a long person one for each column of the table.
        rows = row_budget(len(self.model.table), self._token_budget)
        size = self.team.size
        return Budget(
            self._max_length, max(1, self._token_budget // size), max(1, rows // size), self.model.table.shape[1]
        )


def clipped_sensitivity(bound: float, most: int, numbers: int, grid: float) -> float:
    """C / g (1 + 1e-6 + m 2^-21) + sqrt(d), in grid steps."""
    return bound / grid * (1 + CLIP_SLACK + most * FLOAT32_SLACK) + math.sqrt(numbers)


def check_room(people: int, bound: float, grid: float) -> None:
    """Refuse more people than float64 can add up: whole numbers are exact below 2^53, in any partial sum.

    A person adds at most bound / grid steps to a number, times 1 + CLIP_SLACK + most FLOAT32_SLACK, which is below 2.
    """
    if 2 * people * bound / grid >= 2.0**53:
        raise PrivacyError(
            f"{people:,} people make clipped sums too large to be exact; nothing was released. Lower the batch size"
        )


def whole_sums(names: list[str], totals: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """Sums of whole numbers in float64 as int64, by name; one that is not finite or exact is refused before it is charged."""
    for name, total in zip(names, totals, strict=True):
        if not total.numel():
            continue
        low, high = (float(value) for value in torch.aminmax(total))  # without a temporary array as large
        if not (math.isfinite(low) and math.isfinite(high)):
            raise PrivacyError(f"the clipped sum of parameter {name!r} is not finite; nothing was released")
        if max(-low, high) >= 2.0**53:
            raise PrivacyError(f"the clipped sum of parameter {name!r} is too large to be exact; nothing was released")
    return {name: total.to(torch.int64).cpu().numpy() for name, total in zip(names, totals, strict=True)}


def _cut(rows: Sequences, users: np.ndarray, budget: Budget) -> Iterator[MicroBatch]:
    return micro_batches(
        rows,
        users,
        max_length=budget.max_length,
        token_budget=budget.tokens,
        row_budget=budget.rows,
        longest=budget.columns,
    )


def check_precision(model: torch.nn.Module) -> None:
    """Refuse arithmetic that is less exact than the slack assumes: the float32 of a private step must be float32."""
    coarse = [str(p.dtype) for p in model.parameters() if p.dtype not in (torch.float32, torch.float64)]
    device = next(model.parameters()).device.type
    if coarse:
        raise PrivacyError(f"a parameter is of type {coarse[0]}; private steps are made in float32: call model.float()")
    if torch.is_autocast_enabled(device):
        raise PrivacyError("autocast is on; private steps are made in float32: leave autocast out")
    if not _exact_products():
        raise PrivacyError(
            "float32 products are set to be less exact; call torch.set_float32_matmul_precision('highest') for private steps"
        )


def check_dropout(model: torch.nn.Module) -> None:
    """Refuse torch's own layers of dropout: one person's leaving would change the masks of all others."""
    if any(
        isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0 and part.training
        for part in model.modules()
    ):
        raise PrivacyError(
            "a layer of torch's dropout draws the masks of a whole batch at once; set its rate to 0, call eval(), or use "
            "dpformer.models.dropout.Dropout in its place"
        )


def _exact_products() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # of torch, when a backend alone was set to be less exact
        return False


def slack_in_words(users: int, rate: float) -> str:
    """What the guarantee assumes of float32, for the statement."""
    most = Groups.of(users, rate).most
    return (
        "clipped gradients are added up in float32, in groups of at most "
        f"{most} users; one user's leaving changes what rounding does to the others of the group by at most {most} x 2^-21 = "
        f"{most * FLOAT32_SLACK:.2g} of the clipping norm, for which noise was added. That is not proven; `dpformer verify` "
        "measures it and fails above a quarter"
    )
