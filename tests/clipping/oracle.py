"""The independent check: one sample at a time through plain autograd."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpformer import PhantomClipping

Losses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def loop(module: nn.Module, losses: Losses, batch: tuple[Tensor, ...]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Norms `[B]` and gradients of every sample, by autograd on a batch of that sample alone."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    gradients = []
    for i in range(len(batch[0])):
        loss = losses(module, tuple(x[i : i + 1] for x in batch))
        assert loss.shape == (1,)
        results = torch.autograd.grad(loss[0], list(parameters.values()), allow_unused=True)
        gradients.append(
            {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), results, strict=True)}
        )
    squares = [sum(g.double().square().sum() for g in sample.values()) for sample in gradients]
    return torch.stack([torch.as_tensor(s).sqrt() for s in squares]) if squares else torch.zeros(0), gradients


def weighted(gradients: list[dict[str, Tensor]], weights: Tensor) -> dict[str, Tensor]:
    return {n: sum(w * g[n] for w, g in zip(weights, gradients, strict=True)) for n in gradients[0]}


def automatic(norms: Tensor) -> Tensor:
    return 1.0 / (norms + 0.01)


def flat(norms: Tensor) -> Tensor:
    return (1.0 / norms).clamp(max=1)


def assert_exact(
    module: nn.Module, losses: Losses, *batch: Tensor, tolerance: float = 1e-9, rule: str = "automatic"
) -> None:
    """Norms and clipped sums equal those of the loop, by both routes and by the one chosen."""
    norms, gradients = loop(module, losses, batch)
    for route in ("gram", "formed", None):
        for p in module.parameters():
            p.grad = None
        clipping = PhantomClipping(module, rule=rule, route=route)
        got = clipping.backward(lambda: losses(module, batch))
        torch.testing.assert_close(got.double(), norms.double(), rtol=tolerance, atol=tolerance * 1e-3)
        # The slack of 1e-6 on the norm is meant; the factors are taken as they are and the sum must fit them.
        factors = {"automatic": automatic, "flat": flat}[rule](norms.double())
        expected = weighted(gradients, factors)
        size = sum(g.double().square().sum() for g in expected.values()).sqrt()
        wrong = sum(
            (p.grad - expected[n]).double().square().sum() for n, p in module.named_parameters() if n in expected
        ).sqrt()
        assert wrong <= (2e-6 + tolerance) * max(size, 1e-12), (route, wrong, size)
        # Without the slack, the sum is exact. The structure has been checked by now, so that what is used once is derived early.
        for p in module.parameters():
            p.grad = None
        again = clipping.weighted_sum(lambda: losses(module, batch), factors)
        torch.testing.assert_close(again.double(), norms.double(), rtol=tolerance, atol=tolerance * 1e-3)
        for n, p in module.named_parameters():
            if n in expected:
                torch.testing.assert_close(p.grad, expected[n], rtol=tolerance, atol=tolerance * float(size) + 1e-300)
