"""What one person's leaving changes for people who are alike, if all are padded to the longest person of a micro-batch.

    python attacks/padding.py

|S(all) - S(without one) - S(that one)|, S the clipped sum of 600 people in one micro-batch, in units of the clipping norm C and
as a share of the slack for float32, (1e-6 + m 2^-21) C. The one who leaves is longer than the others. `PrivateTraining` refuses
the first way to pad; the second is what it asks for.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer import PhantomClipping
from dpformer.training.groups import CLIP_SLACK, FLOAT32_SLACK

ITEMS, PEOPLE, LENGTHS, LONGER, WIDTH = 100, 600, (5, 8), 30, 40


class Attention(nn.Module):
    """Two blocks with a causal mask: padding at the end is not read."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 2, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.items, self.positions = nn.Embedding(ITEMS, d), nn.Embedding(WIDTH, d)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, s: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(s.shape[1])
        return self.blocks(self.items(s) + self.positions.weight[: s.shape[1]], mask) @ self.items.weight.T


class Recurrent(nn.Module):
    """Two layers of an LSTM: padding at the end is not read either."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.items, self.layers = nn.Embedding(ITEMS, d), nn.LSTM(d, d, 2, batch_first=True)

    def forward(self, s: Tensor) -> Tensor:
        return self.layers(self.items(s))[0] @ self.items.weight.T


class Convolution(nn.Module):
    """Reads what stands behind a person's last item: padding, or the end of the batch."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.items, self.layer, self.head = nn.Embedding(ITEMS, d), nn.Conv1d(d, d, 3, padding=1), nn.Linear(d, ITEMS)

    def forward(self, s: Tensor) -> Tensor:
        return self.head(self.layer(self.items(s).transpose(1, 2)).relu().transpose(1, 2))


MODELS = (Attention, Recurrent, Convolution)


def to_the_longest(people: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(people, batch_first=True)


def to_one_length(people: list[Tensor]) -> Tensor:
    return torch.stack([F.pad(one, (0, WIDTH - len(one))) for one in people])


def moved(model: nn.Module, collate: Callable[[list[Tensor]], Tensor], length: int, count: int = PEOPLE) -> float:
    """What the leaving of a longer person changes in the sum of the others, in units of C."""

    def total(people: list[Tensor]) -> Tensor:
        s = collate(people)
        model.zero_grad()

        def losses() -> Tensor:  # the mean over a person's own positions
            each = F.cross_entropy(model(s[:, :-1]).transpose(1, 2), s[:, 1:], reduction="none", ignore_index=0)
            return each.sum(1) / (s[:, 1:] > 0).sum(1)

        PhantomClipping(model, 1.0, "flat").backward(losses)
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    alike = [torch.arange(1, length + 1)] * (count - 1)
    long = torch.randint(1, ITEMS, (length + LONGER,), generator=torch.Generator().manual_seed(5))
    return float((total([*alike, long]) - total(alike) - total([long])).norm())


def worst(kind: type[nn.Module], collate: Callable[[list[Tensor]], Tensor]) -> float:
    """The worst over people of several lengths, in units of C."""
    torch.manual_seed(1)
    model = kind()
    return max(moved(model, collate, length) for length in LENGTHS)


if __name__ == "__main__":
    slack = CLIP_SLACK + PEOPLE * FLOAT32_SLACK
    for kind in MODELS:
        for collate in (to_the_longest, to_one_length):
            size = worst(kind, collate)
            print(f"{kind.__name__:12} {collate.__name__:15} {size:10.2g} C, {size / slack:10.2g} of the slack")
