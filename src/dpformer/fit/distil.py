"""Train a network on released transition scores, on histories sampled from them.

The log is not used here, so any number of steps costs no privacy. The network is smoother than the statistics: it has d numbers
per item instead of one number per pair, so that the noise of single cells averages out. It lacks the detail of single cells.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dpformer.models import Network, TransitionScorer

# Histories that are sampled, and how many of them, at how many of their places, make a step.
HISTORIES, BATCH, PLACES = 2000, 64, 8
RATE, WARMUP = 5e-3, 20
# The mean norm of an item's embedding at the start.
NORM = 0.5
# The largest score of a row of the teacher, on average; above it scores are scaled down, since their softmax would be one item.
SHARPEST = 4.0
# How far below the least item of the head all others stand.
BELOW = 2.0


def distil(network: Network, transitions: TransitionScorer, steps: int) -> Iterator[int]:
    """Let a new network learn what the released `transitions` say; its vocabulary becomes their most frequent items.

        min  mean over histories and places of  KL( softmax teacher || softmax network )

    by Adam. Embeddings start as the leading eigenvectors of the symmetrised score matrix, times the roots of their eigenvalues: a
    product of two of them is then already an entry of it. The output bias is learned too, and fixed afterwards. All randomness
    comes from a fixed seed: it has nothing to do with the data, and a run that is made again gets the same network.
    """
    teacher = choose_by(network, transitions)
    with torch.no_grad():
        teacher.matrix *= scale_of(teacher)
    in_head = teacher.tail > -torch.inf
    generator = torch.Generator().manual_seed(0)
    length = min(network.spec.max_length, 30, int(in_head.sum()))
    if length < 2:
        return
    s = sample(teacher, HISTORIES, length, generator)
    with torch.no_grad():
        network.embedding.weight[in_head] = _leading(teacher.matrix[:-1], network.table.shape[1])
        if network.output is not None:
            network.output.weight.copy_(network.embedding.weight)
    bias = torch.zeros(len(in_head)).scatter(0, teacher.head, teacher.prior).requires_grad_()
    optimizer = torch.optim.Adam([*network.parameters(), bias], lr=RATE)
    network.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
        drawn = s[torch.randint(0, len(s), (BATCH,), generator=generator)]
        places = torch.randperm(length - 1, generator=generator)[:PLACES].tolist()
        wanted = torch.cat([scores_at(teacher, drawn, place) for place in places])[:, in_head].softmax(1)
        hidden = network.states(drawn)[:, places].transpose(0, 1).flatten(0, 1)
        learned = (hidden @ network.table[in_head].T + bias[in_head]).log_softmax(1)
        optimizer.zero_grad()
        (-(wanted * learned).sum(1).mean()).backward()
        optimizer.step()
        yield step + 1
    network.zero_grad(set_to_none=True)
    _set_bias(network, transitions, bias.detach(), in_head)


def scale_of(transitions: TransitionScorer) -> float:
    """What the scores of a teacher are multiplied by."""
    return min(1.0, SHARPEST / max(float(transitions.within_head().amax(1).mean()), 1e-6))


def choose_by(network: Network, transitions: TransitionScorer) -> TransitionScorer:
    """Give a network the most frequent items as its vocabulary; returns the teacher, which scores rows of its table.

    Rows of items outside the head score -inf.
    """
    none = torch.zeros(1, dtype=torch.int64)
    network.choose(transitions.scores(none[:, None], none)[0], bias=False)  # without a history: by the noisy histogram
    return transitions.renumbered(network.places(), len(network.table) - 1)


def scores_at(teacher: TransitionScorer, s: Tensor, place: int) -> Tensor:
    """The teacher's scores `[B, rows + 1]` after the items up to `place` of histories `[B, L]`."""
    return teacher.scores(s[:, : place + 1], torch.full((len(s),), place + 1))


def sample(teacher: TransitionScorer, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Histories `[count, length]`: the first item by popularity, each other from the softmax of the scores, none twice."""
    s = torch.zeros(count, length, dtype=torch.int64)
    seen = torch.zeros(count, len(teacher.tail), dtype=torch.bool)
    popularity = teacher.popularity()
    assert popularity is not None
    item = torch.multinomial(popularity.expand(count, -1), 1, generator=generator)
    for t in range(length):
        s[:, t] = item[:, 0]
        seen.scatter_(1, item, True)
        if t + 1 < length:
            scores = scores_at(teacher, s, t).masked_fill(seen, -torch.inf)
            item = torch.multinomial(scores.softmax(1), 1, generator=generator)
    return s


def _leading(matrix: Tensor, d: int) -> Tensor:
    """`[rows, d]`: the d leading eigenvectors of the symmetric part, times the roots of their eigenvalues; mean norm 0.5."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T).double() / 2)
    leading = torch.zeros(len(matrix), d)
    count = min(d, len(matrix))
    leading[:, :count] = (vectors * values.clamp_min(0).sqrt()).flip(1)[:, :count].float()
    return leading * (NORM / leading.norm(dim=1).mean().clamp_min(1e-6))


@torch.no_grad()
def _set_bias(network: Network, transitions: TransitionScorer, bias: Tensor, in_head: Tensor) -> None:
    """The learned bias for the head; all other items below it, in the order of the noisy histogram, or by their popularity.

    With features the transitions score those as items of the head; the network says nothing about them but their popularity.
    """
    tail = transitions.tail
    below = float(bias[in_head].min()) - BELOW + tail / len(tail)
    if transitions.targets is not None:
        below = tail + (float(bias[in_head].mean()) - float(transitions.prior.mean()))
    network.output_bias[1:] = below[1:]
    items = network.chosen if network.chosen is not None else torch.arange(len(in_head))
    network.output_bias[items[in_head]] = bias[in_head]
