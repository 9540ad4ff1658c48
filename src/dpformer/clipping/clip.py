"""From a sample's gradient norm to the factor that its gradient is multiplied by."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpformer.errors import ClippingError

Rule = Literal["automatic", "flat"]

# Relative room above the computed norm, for rounding in the norm itself and in the multiplication.
SLACK = 1e-6
# In units of machine epsilon: the error of a squared norm relative to the square of the sum of its terms' sizes.
ROUNDING = 16
# Keeps the automatic factor finite for a vanishing gradient (Bu et al. 2022).
STABILITY = 0.01


@dataclass(frozen=True)
class Clip:
    """How much of a sample's gradient g goes into the sum; in every case `|c g| <= max_norm`.

    flat       c = min(1, C / |g|)      (Abadi et al. 2016)
    automatic  c = C / (|g| + 0.01)     (Bu et al. 2022): every sample counts about the same; no C to tune

    The norm used is not the computed one but one that rounding cannot have made too small. A gradient is a sum of terms
    (times, uses) which may nearly cancel, and then the rounding errors of the terms outweigh what is left. With
    `K = sum of the norms of the terms`, errors of the squared norm and of the sum that is released are a few machine
    epsilons times `K^2` and `K`, so

        |g|_safe = (1 + 1e-6) sqrt(|g|^2 + 16 eps K^2)

    keeps the contribution below `C (1 + 1e-6)`. Where nothing cancels, K is a few times |g| and this is about 1e-5.
    """

    max_norm: float = 1.0
    rule: Rule = "automatic"

    def __post_init__(self) -> None:
        if not (isinstance(self.max_norm, (int, float)) and 0 < self.max_norm < float("inf")):
            raise ClippingError(f"max_norm must be a positive number, not {self.max_norm!r}")
        if self.rule not in ("automatic", "flat"):
            raise ClippingError(f"rule must be 'automatic' or 'flat', not {self.rule!r}")

    def factors(self, squared: Tensor, bound_squared: Tensor, eps: float) -> Tensor:
        """Factors `[B]` (float64) from `|g|^2` and `K^2` `[B]`; 0 for a sample whose gradient is not finite.

        >>> square = torch.tensor([0.25, 100.0, float("nan")], dtype=torch.float64)
        >>> Clip(rule="flat").factors(square, square, eps=0.0)
        tensor([1.0000, 0.1000, 0.0000], dtype=torch.float64)
        >>> Clip(rule="automatic").factors(square, square, eps=0.0)
        tensor([1.9608, 0.0999, 0.0000], dtype=torch.float64)
        """
        safe = (1 + SLACK) * torch.sqrt(squared.clamp_min(0) + ROUNDING * eps * bound_squared)
        if self.rule == "flat":
            factors = (self.max_norm / safe).clamp_max(1)
        else:
            factors = self.max_norm / (safe + STABILITY)
        return factors.nan_to_num_(0.0)  # an infinite norm has made it 0 already
