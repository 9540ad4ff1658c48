"""The paper's Transformer on one page: next items from people's histories, the embedding tied to the output, any PyTorch.

    python examples/transformer.py [steps]

Compare `dpformer fit --preset dpformer`, which trains the same kind of model with all that the library has for it: micro-batches
by length, averages, and a head that never holds all logits.
"""

import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from dpformer import PrivateTraining
from dpformer.data import demo_frame

frame = demo_frame().sort("timestamp")
items = {item: k + 1 for k, item in enumerate(sorted(frame["item_id"].unique().to_list()))}  # public; 0 is padding
histories = [
    [items[item] for item in own] for own in frame.group_by("user_id", maintain_order=True).agg("item_id")["item_id"]
]
M, L, d = len(items) + 1, 20, 48


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.positions = nn.Embedding(M, d, padding_idx=0), nn.Parameter(torch.zeros(L, d))
        nn.init.normal_(self.items.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(d, 1, d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.LayerNorm(d)

    def forward(self, s):  # [B, T] to scores of the next item [B, T, M]
        x = self.items(s) * d**0.5 + self.positions[: s.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(s.shape[1])
        return self.norm(self.blocks(x, mask, is_causal=True)) @ self.items.weight.T


def collate(
    people,
):  # the last L + 1 items but one, padded at the end: the last item of each person is for the evaluation
    rows = [own[:-1][-L - 1 :] for own in people]
    return torch.tensor([row + [0] * (L + 1 - len(row)) for row in rows])


def losses(s):  # one for each person, a mean over the person's own positions
    each = F.cross_entropy(model(s[:, :-1]).transpose(1, 2), s[:, 1:], reduction="none", ignore_index=0)
    return each.sum(1) / (s[:, 1:] > 0).sum(1).clamp_min(1)


torch.manual_seed(0)  # of the initial weights; the draws and the noise have keys of their own
model = Transformer()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
with tempfile.TemporaryDirectory() as folder:  # keep the folder in a real run: the same program goes on from there
    options = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "batch_size": 500,
        "steps": steps,
        "collate_fn": collate,
        "micro_batch": 250,
    }
    private = PrivateTraining(model, optimizer, histories, **options, run=f"{folder}/run")
    for batch in private:
        private.step(lambda: losses(batch))  # noqa: B023
    print(private.statement.text().splitlines()[0])
    print(private.movement.text())

with (
    torch.no_grad()
):  # the held-out item among all that the person has not seen; computed on people's data: not private
    rows = [own[:-1][-L:] for own in histories]
    s = torch.tensor([row + [0] * (L - len(row)) for row in rows])
    scores = torch.stack([own[len(row) - 1] for own, row in zip(model(s), rows, strict=True)])
    for own, history in zip(scores, histories, strict=True):
        own[[0, *history[:-1]]] = -torch.inf
    target = torch.tensor([own[-1] for own in histories])
    hits = scores.topk(10).indices == target[:, None]
print(f"HIT@10 {100 * hits.any(1).float().mean():.1f} %, full ranking, seen items left out (not private)")
