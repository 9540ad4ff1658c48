"""Optimisers for DP-SGD that are compared with the library's own (`dpformer.fit.adam`, whose names are used here).

g is the noisy gradient of a step, s the standard deviation of its noise, which is public, t the number of the step, T that of all
steps. All of them are functions of noisy answers and public numbers, so the guarantee is the same. Without a word about it an
optimiser is plain Adam: m and v are averages of g and g^2 per coordinate that forget by .9 and .999, corrected for their start,
and p' = p - rate m / sqrt(v).

    AdamBC      v contains s^2 of noise, which is subtracted before the root: sqrt(max(v - s^2, s^2 / 10)). (Tang et al., 2023.)
    Doppler     Adam gets f / c in place of g: f' = (1 - k) f + k g and c' = (1 - k) c + k, both 0 at first; k = .1. It is a
                low-pass filter of the first order with its correction for the start. (Zhang et al., "DOPPLER", 2024.)
    Disk        Adam gets f in place of g: f' = (1 - k) f + k g, f = g at first; k = .7. The gradient is asked for at
                x + (1 - k) / k (x - x_before), where x are the weights. (Zhang et al., "DiSK", 2024.)
    Floored     sqrt(v) is not below s; v is of a coordinate.
    Repeating   After the last answer the last T / 5 steps are made again, at their rates, with the mean of their gradients.
    Momentum    m' = .9 m + g and p' = p - rate m / s: no Adam. Over s, so that rates are of the same scale on all data.

DiSK in general asks each user for a combination of two gradients, at x and at x + c (x - x_before). With c = (1 - k) / k the
weight of the gradient at x is 0, so that one gradient per user and step is enough. This case is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dpformer.fit.adam import BETA2, EPSILON, Adam, momentum
from dpformer.fit.dpsgd import Trainer

State = dict[str, Tensor]
BETA1 = 0.9
# A floor so low that it is never reached.
NO_FLOOR = 1e-30


class _OwnDivisor(Adam):
    """Adam with one second moment per coordinate, and a divisor of its own."""

    def divisor(self, v: Tensor) -> Tensor:
        """What a step is divided by. v: the mean of g^2, corrected for its start."""
        raise NotImplementedError

    def _update(self, p: Tensor, g: Tensor, state: State, rate: float) -> None:
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        g = g.add(p, alpha=self.weight_decay)
        state["step"] += 1
        t = int(state["step"])
        m = state["exp_avg"].lerp_(g, 1 - self.beta1)
        v = state["exp_avg_sq"].lerp_(g.square(), 1 - BETA2)
        p.addcdiv_(m, self.divisor(v / (1 - BETA2**t)), value=-rate / (1 - self.beta1**t))


class Floored(_OwnDivisor):
    """Adam per coordinate, no divisor below the noise."""

    def divisor(self, v: Tensor) -> Tensor:
        """max(sqrt(v), s)."""
        return v.sqrt().add_(EPSILON).clamp_min_(self.noise_std)


class AdamBC(_OwnDivisor):
    """DP-AdamBC. lower: the least second moment, in parts of s^2."""

    lower = 0.1

    def divisor(self, v: Tensor) -> Tensor:
        """sqrt(max(v - s^2, lower s^2))."""
        return (v - self.noise_std**2).clamp_min_(self.lower * self.noise_std**2).sqrt_()


class Doppler(Adam):
    """Plain Adam behind a low-pass filter. gain: k."""

    gain = 0.1

    def _update(self, p: Tensor, g: Tensor, state: State, rate: float) -> None:
        t = int(state["step"]) + 1 if state else 1
        f = g * self.gain + (state["filtered"] * (1 - self.gain) if state else 0)
        super()._update(p, f / (1 - (1 - self.gain) ** t), state, rate)
        state["filtered"] = f


class Disk(Adam):
    """Plain Adam behind a simplified Kalman filter. p is where the gradient is asked for, and the weights after the last step."""

    gain = 0.7

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float, steps: int) -> None:
        super().__init__(parameters, weight_decay, BETA1)
        self.steps = steps

    def _update(self, p: Tensor, g: Tensor, state: State, rate: float) -> None:
        before = state["weights"] if state else p.clone()
        f = g.lerp(state["filtered"], 1 - self.gain) if state else g.clone()
        p.copy_(before)
        super()._update(p, f, state, rate)
        state["weights"], state["filtered"] = p.clone(), f
        if int(state["step"]) < self.steps:
            p.add_(p - before, alpha=(1 - self.gain) / self.gain)


class Repeating(Adam):
    """The library's Adam, then the last fifth of its steps again with the mean of their gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float, noise_std: float, steps: int) -> None:
        super().__init__(parameters, weight_decay, momentum(steps), noise_std)
        self.steps, self.repeated = steps, steps // 5

    def _update(self, p: Tensor, g: Tensor, state: State, rate: float) -> None:
        super()._update(p, g, state, rate)
        t = int(state["step"])
        if (k := t - 1 - (self.steps - self.repeated)) < 0:
            return
        mean = state.setdefault("mean", torch.zeros_like(p)).add_(g, alpha=1 / self.repeated)
        state.setdefault("rates", torch.zeros(self.repeated, dtype=torch.float64))[k] = rate
        if t == self.steps:
            for again in state["rates"].tolist():
                super()._update(p, mean, state, again)


class Momentum(Adam):
    """SGD with momentum."""

    def _update(self, p: Tensor, g: Tensor, state: State, rate: float) -> None:
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        m.mul_(self.beta1).add_(g).add_(p, alpha=self.weight_decay)
        p.add_(m, alpha=-rate / self.noise_std)


OURS = "ours"
PLAIN = "plain Adam"
# Parameters, weight decay, s, T.
Make = Callable[[list[nn.Parameter], float, float, int], Adam]
OPTIMISERS: dict[str, Make] = {
    OURS: lambda p, decay, s, T: Adam(p, decay, momentum(T), s),
    PLAIN: lambda p, decay, s, T: Adam(p, decay, BETA1),
    "ours without the floor": lambda p, decay, s, T: Adam(p, decay, momentum(T), NO_FLOOR),
    "ours with beta1 .9": lambda p, decay, s, T: Adam(p, decay, BETA1, s),
    "ours, second moments per coordinate": lambda p, decay, s, T: Floored(p, decay, momentum(T), s),
    "ours, last steps repeated": lambda p, decay, s, T: Repeating(p, decay, s, T),
    "DP-AdamBC": lambda p, decay, s, T: AdamBC(p, decay, BETA1, s),
    "DOPPLER": lambda p, decay, s, T: Doppler(p, decay, BETA1),
    "DiSK": lambda p, decay, s, T: Disk(p, decay, T),
    "SGD with momentum": lambda p, decay, s, T: Momentum(p, decay, BETA1, s),
}


def exchange(trainer: Trainer, name: str) -> None:
    """Give a trainer, new or resumed, the optimiser of this name; a resumed one goes on from its state."""
    old = trainer.optimizer
    new = OPTIMISERS[name](old.parameters, old.weight_decay, old.noise_std, trainer.plan.steps)
    new.restore(old.state())
    trainer.optimizer = new
