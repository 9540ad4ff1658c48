"""Small models, each with a kind of sharing or a function of its own; losses are one per sample."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def next_token_losses(logits: Tensor, s: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of predicting s itself, over positions with s > 0 (0 is padding)."""
    each = F.cross_entropy(logits.transpose(1, 2), s, reduction="none") * (s > 0)
    total = each.sum(1)
    return total / (s > 0).sum(1).clamp_min(1) if reduction == "mean" else total


class Tied(nn.Module):
    """A one-block Transformer with a shared embedding, tied in one of the ways people tie."""

    def __init__(
        self, M: int, d: int, L: int, tie: str = "functional-T", padding: bool = True, reduction: str = "mean"
    ):
        super().__init__()
        self.tie, self.reduction = tie, reduction
        self.embedding = nn.Embedding(M, d, padding_idx=0 if padding else None)
        with torch.no_grad():
            self.embedding.weight.normal_()
        self.positions = nn.Parameter(torch.randn(L, d))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        if tie == "module":
            self.head = nn.Linear(d, M, bias=False)
            self.head.weight = self.embedding.weight
        if tie == "untied":
            self.head = nn.Linear(d, M)

    def forward(self, s: Tensor) -> Tensor:
        x = self.embedding(s) + self.positions[: s.shape[1]]
        h = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        match self.tie:
            case "functional-T":
                return x @ self.embedding.weight.T
            case "functional-transpose":
                return torch.matmul(x, self.embedding.weight.transpose(0, 1))
            case "functional-linear":
                return F.linear(x, self.embedding.weight)
            case "left":
                return (self.embedding.weight @ x.transpose(1, 2)).transpose(1, 2)
            case "rows":
                return F.pad(x @ self.embedding.weight[1:].T, (1, 0))
            case _:
                return self.head(x)

    def losses(self, s: Tensor) -> Tensor:
        return next_token_losses(self(s), s, self.reduction)


class Albert(nn.Module):
    """One block used three times, and the embedding tied."""

    def __init__(self, M: int, d: int):
        super().__init__()
        self.embedding = nn.Embedding(M, d)
        self.block = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d, bias=False))
        self.scale = nn.Parameter(torch.rand(d) + 0.5)

    def losses(self, s: Tensor) -> Tensor:
        x = self.embedding(s)
        for _ in range(3):
            x = x + self.block(x) * self.scale
        return next_token_losses(F.linear(x, self.embedding.weight), s)


class Recurrent(nn.Module):
    """A plain recurrent network: its weight is used at each step."""

    def __init__(self, M: int, d: int):
        super().__init__()
        self.embedding = nn.Embedding(M, d)
        self.inner, self.outer = nn.Linear(d, d), nn.Linear(d, d, bias=False)

    def losses(self, s: Tensor) -> Tensor:
        x = self.outer(self.embedding(s))
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(s.shape[1]):
            h = torch.tanh(x[:, t] + self.inner(h))
            states.append(h)
        return next_token_losses(torch.stack(states, 1) @ self.embedding.weight.T, s)


class Everything(nn.Module):
    """One parameter used in every form at once: looked up, as a head, as a bias table, transposed, scaled by."""

    def __init__(self, n: int):
        super().__init__()
        self.P = nn.Parameter(torch.randn(n, n))

    def losses(self, s: Tensor) -> Tensor:
        n = self.P.shape[0]
        x = F.embedding(s, self.P)  # sparse
        x = x + self.P[:1] + self.P[torch.arange(s.shape[1]) % n]  # rows, the same for all samples
        x = x @ self.P  # outer
        x = torch.tanh(x) * self.P[0]  # a row as a scale
        x = F.linear(x, self.P.T)  # outer, the other way round
        x = x[:, :, None, :] + self.P  # dense
        return x.square().mean((1, 2, 3)) + x.sin().sum((1, 2, 3))
