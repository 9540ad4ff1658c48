"""A module of one's own whose parameter is used in a way that Phantom Clipping does not know, and the rule that teaches it.

The module weighs the past by a learned decay, `out_t = sum over u <= t of exp(-softplus(r)_k (t - u)) x_u` for each channel k: a
parameter inside an exponential of time differences, in one einsum. Without a rule the guard refuses it; with the rule, norms are
exact, which is checked here against one backward pass a sample.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer import PhantomClipping
from dpformer.clipping import Dense, register_rule
from dpformer.errors import DPFormerError


def decayed_sum(x: Tensor, r: Tensor) -> Tensor:
    """x `[B, T, d]`, r `[d]`; a torch function, so that the recorder sees it."""
    if torch.overrides.has_torch_function((x, r)):
        return torch.overrides.handle_torch_function(decayed_sum, (x, r), x, r)
    return torch.einsum("tuk,buk->btk", weights(r, x.shape[1]), x)


def weights(r: Tensor, length: int) -> Tensor:
    """exp(-softplus(r)_k (t - u)) for u <= t, else 0: `[T, T, d]`."""
    age = torch.arange(length)[:, None] - torch.arange(length)
    return torch.exp(-F.softplus(r) * age.clamp_min(0)[..., None]) * (age >= 0)[..., None]


class Memory(nn.Module):
    def __init__(self, items: int = 50, d: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(items, d)
        self.decay = nn.Parameter(torch.zeros(d))

    def losses(self, s: Tensor) -> Tensor:
        h = torch.tanh(decayed_sum(self.embedding(s[:, :-1]), self.decay))
        logits = h @ self.embedding.weight.T  # tied, as in the recommenders
        return F.cross_entropy(logits.transpose(1, 2), s[:, 1:], reduction="none").mean(1)


torch.manual_seed(0)
model, s = Memory().double(), torch.randint(0, 50, (8, 12))
try:
    PhantomClipping(model).backward(lambda: model.losses(s))
except DPFormerError as refused:
    print("without a rule:", str(refused).splitlines()[0])


@register_rule(decayed_sum)
def rule(recorder, function, x, r):
    """d out_t / d r_k = -sigmoid(r_k) sum_u (t - u) w_tuk x_uk, times the gradient that arrives at out, summed over t."""
    view, value = recorder.view(r), recorder.value(r)
    output = decayed_sum(x, value)

    def derive(gradient, samples, x):
        with torch.no_grad():
            length = x.shape[1]
            age = (torch.arange(length)[:, None] - torch.arange(length)).clamp_min(0)[..., None]
            slope = -torch.sigmoid(value) * age * weights(value, length)  # [T, T, d]
            terms = gradient * torch.einsum("tuk,buk->btk", slope, x)  # [B, T, d]
        # The gradient of each sample as a column [B, d, 1], and the sizes of what was summed: room for rounding.
        yield view, Dense(terms.sum(1)[..., None], terms.norm(dim=2).sum(1))

    return recorder.record(function, output, [view], derive, saved=[x.detach()])


norms = PhantomClipping(model).norms(lambda: model.losses(s))
alone = []
for one in s:
    model.zero_grad()
    model.losses(one[None]).sum().backward()
    alone.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
worst = float((norms / torch.stack(alone) - 1).abs().max())
print(f"with it: norms agree with one backward pass a sample to {worst:.0e}")
assert worst < 1e-4
