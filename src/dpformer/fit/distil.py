"""A network that starts from released statistics: it learns to score as they do, on histories sampled from them.

Nothing of the log is seen here, so it costs no privacy, and any number of steps may be made. What the network has over the
statistics is smoothness: d numbers an item instead of one number a pair, so that the noise of single cells averages out. What it
lacks is the detail of single cells.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.models.network import SequenceModel
from dpformer.models.transitions import DPTransitions

# Histories that are sampled, and how many of them, at how many of their places, make a step.
HISTORIES, BATCH, PLACES = 2000, 64, 8
RATE, WARMUP = 5e-3, 20
# The mean norm of an item's embedding at the start.
NORM = 0.5
# How far below the least item of the head all others stand.
BELOW = 2.0


class Teacher:
    """The statistics' scores for rows of a network's table, `[rows + 1]` of them; row 0 is the padding.

    Rows of items outside the head are known to neither of the two: they score -inf.
    """

    def __init__(self, prior: DPTransitions, network: SequenceModel) -> None:
        state = prior.state()
        head, rows = state["head"], len(network.table)
        place = network.places()[head]
        known = place > 0
        self.matrix = torch.zeros(rows, rows)
        self.matrix[place[known][:, None], place[known]] = state["matrix"][:-1][known][:, known]
        self.prior = torch.full((rows,), -torch.inf)
        self.prior[place[known]] = state["prior"][known]
        self.popularity = prior.popularity()[network.chosen if network.chosen is not None else slice(None)]
        self.popularity = torch.where(self.prior > -torch.inf, self.popularity, 0.0)
        self.weights = 1 / torch.arange(1.0, prior.settings.window + 1)

    def scores(self, recent: Tensor) -> Tensor:
        """`[B, rows]` for the last items of histories `[B, window]`, newest first, 0 where there is none."""
        weights = self.weights.expand(len(recent), -1).contiguous()
        return F.embedding_bag(recent, self.matrix, per_sample_weights=weights, mode="sum") + self.prior

    def recent(self, s: Tensor, place: int) -> Tensor:
        """The items up to `place` of histories `[B, L]`, newest first, `[B, window]`."""
        window = len(self.weights)
        found = s[:, max(0, place + 1 - window) : place + 1].flip(1)
        return F.pad(found, (0, window - found.shape[1]))

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Histories `[count, length]`: the first item by popularity, each other from the softmax of the scores, none twice."""
        s = torch.zeros(count, length, dtype=torch.int64)
        seen = torch.zeros(count, len(self.prior), dtype=torch.bool)
        item = torch.multinomial(self.popularity.expand(count, -1), 1, generator=generator)
        for t in range(length):
            s[:, t] = item[:, 0]
            seen.scatter_(1, item, True)
            if t + 1 < length:
                scores = self.scores(self.recent(s, t)).masked_fill(seen, -torch.inf)
                item = torch.multinomial(scores.softmax(1), 1, generator=generator)
        return s


def distil(network: SequenceModel, prior: DPTransitions, steps: int) -> None:
    """Let a new network learn what the released `prior` says; its vocabulary becomes the prior's most frequent items.

        min  mean over histories and places of  KL( softmax teacher || softmax network )

    by Adam. Embeddings start as the leading eigenvectors of the symmetrised score matrix, times the roots of their eigenvalues: a
    product of two of them is then already an entry of it. The output bias is learned too, and fixed afterwards. All randomness
    comes from a fixed seed: it has nothing to do with the data, and a run that is made again gets the same network.
    """
    network.choose(prior.popularity(), bias=False)
    teacher = Teacher(prior, network)
    known = teacher.prior > -torch.inf
    generator = torch.Generator().manual_seed(0)
    length = min(network.max_length or 30, 30, int(known.sum()))
    if length < 2:
        return
    s = teacher.sample(HISTORIES, length, generator)
    with torch.no_grad():
        network.embedding.weight[known] = _leading(teacher.matrix[known][:, known], network.table.shape[1])
        if network.output is not None:
            network.output.weight.copy_(network.embedding.weight)
    bias = torch.where(known, teacher.prior, 0.0).requires_grad_()
    optimizer = torch.optim.Adam([*network.parameters(), bias], lr=RATE)
    network.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
        drawn = s[torch.randint(0, len(s), (BATCH,), generator=generator)]
        places = torch.randperm(length - 1, generator=generator)[:PLACES].tolist()
        wanted = torch.cat([teacher.scores(teacher.recent(drawn, place)) for place in places])[:, known].softmax(1)
        hidden = network(drawn)[:, places].transpose(0, 1).flatten(0, 1)
        found = (hidden @ network.table[known].T + bias[known]).log_softmax(1)
        optimizer.zero_grad()
        (-(wanted * found).sum(1).mean()).backward()
        optimizer.step()
    network.zero_grad(set_to_none=True)
    _set_bias(network, prior, bias.detach(), known)


def _leading(matrix: Tensor, d: int) -> Tensor:
    """`[rows, d]`: the d leading eigenvectors of the symmetric part, times the roots of their eigenvalues; mean norm 0.5."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T).double() / 2)
    found = torch.zeros(len(matrix), d)
    count = min(d, len(matrix))
    found[:, :count] = (vectors * values.clamp_min(0).sqrt()).flip(1)[:, :count].float()
    return found * (NORM / found.norm(dim=1).mean().clamp_min(1e-6))


@torch.no_grad()
def _set_bias(network: SequenceModel, prior: DPTransitions, bias: Tensor, known: Tensor) -> None:
    """The learned bias for the head; all other items below it, in the order of the prior's histogram."""
    tail = prior.state()["tail"]
    below = float(bias[known].min()) - BELOW + tail / len(tail)
    network.output_bias[1:] = below[1:]
    items = network.chosen if network.chosen is not None else torch.arange(len(known))
    network.output_bias[items[known]] = bias[known]
