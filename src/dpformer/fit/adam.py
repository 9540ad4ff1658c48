"""Adam, by torch's own function. Its class does the same, and imports torch's compiler first: a second, and 70 MB."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adam import adam


class Adam:
    """Updates parameters in place from their `.grad`; a parameter without one is left as it is, and has no state.

    >>> p = nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, -0.5])
    >>> Adam([p]).step(rate=0.1)  # the first step has the size of the rate, whatever the gradient
    >>> p.detach()
    tensor([-0.1000,  0.1000])
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float = 0.0) -> None:
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self._state: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update, with this learning rate."""
        with_gradient = [(k, p) for k, p in enumerate(self.parameters) if p.grad is not None]
        for k, p in with_gradient:
            if k not in self._state:
                self._state[k] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        state = [self._state[k] for k, _ in with_gradient]
        adam(
            [p for _, p in with_gradient],
            [p.grad for _, p in with_gradient if p.grad is not None],
            [one["exp_avg"] for one in state],
            [one["exp_avg_sq"] for one in state],
            [],
            [one["step"] for one in state],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )

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
