"""What Opacus makes of a model whose output layer shares the embedding, by function or by module.

    python attacks/peer_ties.py

For one sample: its contribution to the sum in units of the clipping norm C (sound: at most 1), and the cosine between
what is released and the sample's true gradient (right: 1). The worst of 20 seeds, initialised as Transformers are.
fastDP is included where it can be imported (it is not on the package index: put a copy of its source on PYTHONPATH).
"""

import contextlib
import io
import warnings
from importlib.util import find_spec

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn
from torch.nn import functional as F

from dpformer import PhantomClipping

M, D, L = 50, 16, 12


class FunctionalTie(nn.Module):
    """The way most people tie: `h @ embedding.weight.T`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.norm = nn.Embedding(M, D), nn.Linear(D, D), nn.LayerNorm(D)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mix(self.embedding(s))) @ self.embedding.weight.T


class ModuleTie(FunctionalTie):
    """The same model with a module for a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, M, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mix(self.embedding(s))))


def losses(model: nn.Module, s: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(s).transpose(1, 2), s, reduction="none").sum(1)


def opacus_ghost(model: nn.Module, s: torch.Tensor) -> list[torch.Tensor]:
    """Two backward passes, as Opacus' ghost clipping does them: norms, then the sum of losses times the factors."""
    hooked = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )
    losses(hooked, s).sum().backward(retain_graph=True)
    factors = hooked.get_clipping_coef()
    hooked.zero_grad()
    hooked.disable_hooks()
    (losses(hooked, s) * factors.detach()).sum().backward()
    return [p.grad for p in model.parameters()]


def opacus_hooks(model: nn.Module, s: torch.Tensor) -> list[torch.Tensor]:
    """Per-sample gradients by hooks, clipped as the optimiser does."""
    hooked = GradSampleModule(model, loss_reduction="sum")
    losses(hooked, s).sum().backward()
    gradients = [p.grad_sample[0] for p in model.parameters()]
    return [g * (1 / length(gradients)).clamp(max=1) for g in gradients]


def fastdp(model: nn.Module, s: torch.Tensor) -> list[torch.Tensor]:
    """fastDP's book-keeping; what a step of size 1 without noise moves is what is released."""
    from fastDP import PrivacyEngine

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with contextlib.redirect_stdout(io.StringIO()):
        settings = {"clipping_fn": "Abadi", "clipping_mode": "MixOpt", "clipping_style": "all-layer"}
        engine = PrivacyEngine(
            model,
            batch_size=1,
            sample_size=100,
            epochs=1,
            noise_multiplier=1e-9,
            max_grad_norm=1.0,
            loss_reduction="sum",
            **settings,
        )
        engine.attach(optimizer)
        losses(model, s).sum().backward()
        optimizer.step()
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


def phantom(model: nn.Module, s: torch.Tensor) -> list[torch.Tensor]:
    """The same by Phantom Clipping."""
    PhantomClipping(model, max_norm=1.0, rule="flat").backward(lambda: losses(model, s))
    return [p.grad for p in model.parameters()]


def length(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()


def main() -> None:
    warnings.filterwarnings("ignore")
    print(f"{'tie':14} {'method':17} contribution / C   cosine with the true gradient")
    methods = {"Opacus ghost": opacus_ghost, "Opacus hooks": opacus_hooks, "Phantom Clipping": phantom}
    if find_spec("fastDP"):
        methods["fastDP"] = fastdp
    for tie in (FunctionalTie, ModuleTie):
        for name, method in methods.items():
            most, least = 0.0, 1.0
            for seed in range(20):
                torch.manual_seed(seed)
                model, s = tie(), torch.randint(0, M, (1, L))
                true = torch.autograd.grad(losses(model, s).sum(), list(model.parameters()))
                try:
                    found = method(model, s)
                except NotImplementedError as error:
                    print(f"{tie.__name__:14} {name:17} refuses: {error}")
                    break
                most = max(most, float(length(found)))
                dot = sum((a.double() * b.double()).sum() for a, b in zip(true, found, strict=True))
                least = min(least, float(dot / (length(list(true)) * length(found))))
            else:
                print(f"{tie.__name__:14} {name:17} {most:16.6f}   {least:.4f}")


if __name__ == "__main__":
    main()
