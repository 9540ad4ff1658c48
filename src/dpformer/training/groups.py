"""Clipped sums in whole steps of the grid: groups of people by place, and the sensitivity that float32 leaves.

Gradients exist only as float32 sums of some people, and rounding in a float32 sum depends on who else is in it. So people are
divided into groups by their place alone: place // block. The sum of a group is rounded to the grid as whole numbers, and groups
are added as whole numbers, in any order, by any worker or process. One person's events touch the sum of one group only, so

    sensitivity = C / g (1 + 1e-6 + t m 2^-21) + t sqrt(d)        in grid steps g, for d numbers

where m is the largest number of people drawn from a group, and t = 1 the groups that a person touches. With a declared
population a person may be absent from the data, without a place: others then move up by one, and t is the number of all groups.
1e-6 is the clipping's own slack. sqrt(d) is a proof: rounding moves each number of a group's sum by half a step, with the person
and without. m 2^-21 is an assumption: it stands for all that the person's leaving can change in the float32 arithmetic of the
others in the group; no bound on it is known beforehand, and `verify` measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpformer.errors import PrivacyError

CLIP_SLACK = 1e-6
# What float32 can change for one person of a group when another leaves, relative to C. Measured: docs/privacy.md.
FLOAT32_SLACK = 2.0**-21
# Groups of a batch, as far as the people expected in one allow: one for each of two workers, because each group has
# micro-batches of its own, and a micro-batch has a fixed cost (scripts/step_time.py). More processes than groups do not help.
# 4,096 people expected are at most 4,768 drawn: a slack of 0.23 %.
_GROUPS, _SMALLEST, _LARGEST = 2, 1024, 4096


@dataclass(frozen=True)
class Groups:
    """People by their places: group k holds the places k block .. (k + 1) block - 1.

    most: people drawn from a group at the most. touched: groups whose sum one person's leaving can change.
    """

    block: int
    most: int
    touched: int = 1

    @classmethod
    def of(cls, users: int, rate: float, declared: bool = False) -> Groups:
        """Groups for a number of users and a sampling rate, which are public: nothing here depends on anybody's events.

        declared: the users are a declared population (see `PrivacyPlan`), so that one person's leaving touches all groups.
        Of mu people expected, mu + x are drawn with probability exp(-x^2 / (2 mu + 2 x / 3)) at the most (Bernstein); with
        x = 10 sqrt(mu) + 32 that is below 1e-21.
        """
        batch = users * rate
        size = min(max(batch / _GROUPS, _SMALLEST), _LARGEST)
        count = 2 * math.ceil(batch / size / 2)
        block = math.ceil(users / count)
        expected = block * rate
        most = min(block, math.ceil(expected + 10 * math.sqrt(expected) + 32))
        return cls(block, most, math.ceil(users / block) if declared else 1)

    @property
    def slack(self) -> float:
        """1e-6 + t m 2^-21: what a person moves beyond the clipping norm, as a share of it."""
        return CLIP_SLACK + self.touched * self.most * FLOAT32_SLACK

    def sensitivity(self, bound: float, numbers: int, grid: float) -> float:
        """C / g (1 + 1e-6 + t m 2^-21) + t sqrt(d), in grid steps."""
        return bound / grid * (1 + self.slack) + self.touched * math.sqrt(numbers)

    def split(self, drawn: np.ndarray) -> dict[int, np.ndarray]:
        """The people drawn (places, ascending), by group; groups nobody was drawn from are left out."""
        number = drawn // self.block
        starts = np.flatnonzero(np.diff(number, prepend=-1))
        parts = np.split(drawn, starts[1:]) if len(drawn) else []
        if any(len(part) > self.most for part in parts):
            raise PrivacyError(f"more than {self.most} people were drawn from one group; the sampler is not the plan's")
        return {int(part[0]) // self.block: part for part in parts}


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


# What supports that assumption: for the built-in networks, and for a model of the caller's.
VERIFIED = "`dpformer verify` measures it and fails above a quarter"
OWN_MODEL = (
    "no collated shape depends on who is in a batch; three small models with initial weights used less than a tenth of it then "
    "(attacks/padding.py), and this model was not measured"
)


def slack_in_words(groups: Groups, measured: str = VERIFIED) -> str:
    """What the guarantee assumes of float32, for the statement."""
    most, touched = groups.most, groups.touched
    others = "the others of the group" if touched == 1 else f"the others of all {touched} groups"
    product = f"{most} x 2^-21" if touched == 1 else f"{touched} x {most} x 2^-21"
    return (
        f"clipped gradients are added up in float32, in groups of at most {most} users; one user's leaving changes what rounding "
        f"does to {others} by at most {product} = {touched * most * FLOAT32_SLACK:.2g} of the clipping norm, for which noise was "
        f"added. That is not proven; {measured}"
    )


# Numbers at a time, so that what is between float32 and the rounded sum stays in the cache.
_CHUNK = 1 << 15


@torch.no_grad()
def add_rounded(total: Tensor, gradient: Tensor, scale: float) -> None:
    """total += round(scale gradient), for a float64 `total` of whole numbers; scale is a power of 2, so nothing else rounds."""
    flat, source = total.view(-1), gradient.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        piece = source[start : start + _CHUNK].double() * scale
        flat[start : start + _CHUNK].add_(piece.round_())
