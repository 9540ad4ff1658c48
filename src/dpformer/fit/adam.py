"""Adam that takes the noise on its gradients into account; without noise it is torch's.

    m' = b m + (1 - b) g                        v' = b2 v + (1 - b2) mean(g^2)          mean: over a row of a matrix
    a  = rate / (1 - b^t) / max(sqrt(v' / (1 - b2^t)), s)                               p' = p - a m'

s is the standard deviation of the noise on each coordinate of g, `sigma C / B`, which is public. A coordinate's own mean square
is mostly the square of its noise, so dividing by it divides by chance: the mean over a row has less chance in it, and no row is
divided by less than the noise that it certainly has. All of it is a function of noisy gradients and public numbers.

Adam is linear in g where `a` is taken as given, so the variance of the noise in p is carried along, with M the variance of the
noise in m and K the covariance of both:

    M' = b^2 M + (1 - b)^2 s^2        N' = N - 2 a b K + a^2 M'        K' = b K - a M'
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BETA2, EPSILON = 0.999, 1e-8
# Momentum looks back over a twentieth of the steps, `1 / (1 - b)` of them, and over 10 at the most, as Adam usually does.
LOOK_BACK = 0.05


def momentum(steps: int) -> float:
    """b of Adam, for so many steps.

    >>> [momentum(steps) for steps in (10, 40, 80, 1000)]
    [0.0, 0.5, 0.75, 0.9]
    """
    return min(0.9, max(0.0, 1 - 1 / max(1.0, LOOK_BACK * steps)))


class Adam:
    """Updates parameters in place from their `.grad`; a parameter without one is left as it is, and has no state.

    noise_std: s above. track: carry the variance of the noise in each parameter along; see `noise_variances`.

    >>> p = nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, -0.5])
    >>> Adam([p]).step(rate=0.1)  # the first step has the size of the rate, whatever the gradient
    >>> p.detach()
    tensor([-0.1000,  0.1000])
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        weight_decay: float = 0.0,
        beta1: float = 0.9,
        noise_std: float = 0.0,
        track: bool = False,
    ) -> None:
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self.beta1, self.noise_std, self.track = beta1, noise_std, track
        self._state: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update, with this learning rate."""
        for k, p in enumerate(self.parameters):
            if p.grad is not None:
                self._update(p, p.grad, self._state.setdefault(k, {}), rate)

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], rate: float) -> None:
        b, s, rows = self.beta1, self.noise_std, self.noise_std > 0 and p.dim() == 2
        if not state:
            state["step"], state["exp_avg"] = torch.zeros((), device=p.device), torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p[:, :1] if rows else p)
        if self.weight_decay:
            g = g.add(p, alpha=self.weight_decay)
        state["step"] += 1
        t = int(state["step"])
        m = state["exp_avg"].lerp_(g, 1 - b)
        square = g.square().mean(1, keepdim=True) if rows else g.square()
        v = state["exp_avg_sq"].lerp_(square, 1 - BETA2)
        a = rate / (1 - b**t) / (v / (1 - BETA2**t)).sqrt_().add_(EPSILON).clamp_min_(s)
        p.addcmul_(a, m, value=-1)
        if self.track:
            M = state.setdefault("noise_m", v.new_zeros(()))
            K = state.setdefault("noise_mp", torch.zeros_like(v))
            N = state.setdefault("noise_p", torch.zeros_like(v))
            M.mul_(b**2).add_((1 - b) ** 2 * s**2)
            K.mul_(b)
            N.add_(a * (a * M - 2 * K))
            K.sub_(a * M)

    def noise_variances(self) -> list[Tensor]:
        """The variance of the noise in each parameter: `[rows, 1]` for a matrix, else of its own shape. Of tracked ones.

        It takes the divisor as given, and leaves out weight decay.
        """
        return [self._state[k]["noise_p"] for k in range(len(self.parameters))]

    def state(self) -> dict[str, Tensor]:
        """All that it remembers, by the number of the parameter and a name."""
        return {f"{k}.{name}": value for k, state in self._state.items() for name, value in state.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Remember this, where the parameters are."""
        self._state = {}
        for key, value in tensors.items():
            k, name = key.split(".", 1)
            # A copy: what it was given is not written over.
            self._state.setdefault(int(k), {})[name] = value.to(self.parameters[int(k)].device, copy=True)
