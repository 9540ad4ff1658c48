"""The rows of a table dealt to ranks, and the two sums that put their parts together.

Rank r of R has the rows from `r N // R` up to `(r + 1) N // R`, so parts differ by one row at the most. What travels between
ranks is as large as the tokens of a micro-batch, never as the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpformer.errors import DPFormerError, RankError
from dpformer.lost import of_all

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rank `rank`'s part of a table of `count` rows that `size` ranks share. group: a torch.distributed group of them, or all.

    A module that has one as its attribute `rows` says so that its own parameters are such parts.

    >>> [(part.first, part.last) for part in (Rows(10, rank, 4) for rank in range(4))]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """

    count: int
    rank: int
    size: int
    group: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise DPFormerError(f"rank {self.rank} is not one of {self.size} ranks")
        if self.count < self.size:
            raise DPFormerError(
                f"{self.count} rows cannot be split over {self.size} ranks: start at most {self.count} processes"
            )

    @property
    def first(self) -> int:
        """The first of this rank's rows."""
        return self.rank * self.count // self.size

    @property
    def last(self) -> int:
        """The row after the last of this rank's."""
        return (self.rank + 1) * self.count // self.size

    @property
    def own(self) -> slice:
        """This rank's rows of the table."""
        return slice(self.first, self.last)

    def __len__(self) -> int:
        return self.last - self.first

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Places of rows `ids` (any shape) in this rank's part, 0 for those of other ranks; and whether they are in it."""
        owned = (ids >= self.first) & (ids < self.last)
        return (ids - self.first).masked_fill(~owned, 0), owned

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place, the same bits on all of them."""
        return self._reduce(x, "SUM")

    def max_(self, x: Tensor) -> Tensor:
        """The largest of all ranks' x, element by element, in place."""
        return self._reduce(x, "MAX")

    def _reduce(self, x: Tensor, how: str) -> Tensor:
        import torch.distributed as dist

        try:
            dist.all_reduce(x, op=getattr(dist.ReduceOp, how), group=self.group)
        except RuntimeError as error:
            raise RankError(of_all(error, self.rank, self.size)) from None
        return x
