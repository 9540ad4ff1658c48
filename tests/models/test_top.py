"""The best k from few columns, against a full sort of all scores; what is alike, against plain loops."""

import numpy as np
import pytest
import torch

from dpformer.models import (
    GRU,
    Ensemble,
    Popularity,
    RecurrentSpec,
    Transformer,
    TransformerSpec,
    TransitionScorer,
)
from dpformer.models.top import Best, top

ITEMS = 400
HISTORIES = [[], [5], [399, 400, 398], list(range(300, 340)), [7, 7, 9, 380], list(range(1, 60))]


def network(vocabulary, frequencies=False, kind=Transformer):
    torch.manual_seed(1)
    spec = {Transformer: TransformerSpec, GRU: RecurrentSpec}[kind]
    more = {"kind": "gru"} if kind is GRU else {}
    model = kind(spec(items=ITEMS, max_length=8, d=8, vocabulary=vocabulary, frequencies=frequencies, **more)).eval()
    torch.nn.init.normal_(model.embedding.weight)
    counts = torch.rand(ITEMS + 1) + 0.1
    model.choose(counts, bias=True)
    model.output_bias[1:] += torch.randn(ITEMS)  # so that some outside the vocabulary stand above some inside
    if frequencies:
        model.frequencies.copy_(counts)
    return model.requires_grad_(False)


def transitions(size=30):
    torch.manual_seed(2)
    order = torch.randperm(ITEMS) + 1
    tail = torch.zeros(ITEMS + 1)
    tail[order[size:]] = -torch.arange(1.0, ITEMS - size + 1)
    tail[0] = -torch.inf
    matrix = torch.randn(size + 1, size)
    matrix[-1] = 0
    tensors = {"head": order[:size], "matrix": matrix, "prior": torch.randn(size), "tail": tail}
    return TransitionScorer.of(tensors)


def featured():
    plain = transitions().state_dict()
    tail = torch.where(plain["tail"] < 0, torch.randn(ITEMS + 1), 0.0)
    tail[0] = -torch.inf
    sides = {name: torch.randn(ITEMS + 1, 5) for name in ("sources", "targets")}
    sides["sources"][0] = 0
    return TransitionScorer.of({**plain, "tail": tail, **sides})


MODELS = {
    "whole": lambda: network(None),
    "vocabulary": lambda: network(40),
    "frequencies": lambda: network(40, True),
    "gru": lambda: network(40, kind=GRU),
    "transitions": transitions,
    "ensemble": lambda: Ensemble.of(network(40), transitions(), 0.05),
    "ensemble, heavy": lambda: Ensemble.of(network(20, True), transitions(), 2.0),
    "features": featured,
    "ensemble with features": lambda: Ensemble.of(network(40), featured(), 2.0),
    "popularity": lambda: Popularity.of(torch.rand(ITEMS + 1)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [2.0, 1.0, 0.3, 0.05, 0.01])
def test_few_columns_have_the_best_of_all(name, share):
    model = MODELS[name]().eval()
    allowed = torch.rand(ITEMS + 1, generator=torch.Generator().manual_seed(3)) < share
    best, k = Best(model, 7, allowed), 7
    for left_out in ([()] * len(HISTORIES), HISTORIES):
        numbers, values = best.rank(HISTORIES, left_out)
        for history, out, got, value in zip(HISTORIES, left_out, numbers, values, strict=True):
            tokens = torch.tensor([history or [0]])
            scores = model.scores(tokens, torch.tensor([len(history)]))[0].masked_fill(~allowed, -torch.inf)
            scores[[0, *out]] = -torch.inf
            order = scores.sort(descending=True)
            count = min(k, int(scores.isfinite().sum()))
            assert (got > 0).sum() == count
            torch.testing.assert_close(torch.from_numpy(value[:count]), order.values[:count], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(scores[got[:count]], order.values[:count], rtol=1e-4, atol=1e-4)
            assert len(set(got[:count].tolist())) == count


def test_models_that_score_few_items_are_asked_for_few_columns():
    everything = torch.ones(ITEMS + 1, dtype=torch.bool)
    assert len(MODELS["ensemble"]().candidates(10, everything)) <= 40 + 30 + 3 * 10
    assert len(MODELS["transitions"]().candidates(10, everything)) == 40
    assert len(MODELS["popularity"]().candidates(10, everything)) == 10


@pytest.mark.parametrize("width", [1, 9, 8192, 8193, 8208, 20_000])
def test_the_search_by_groups_is_a_sort(width):
    scores = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).round(decimals=2)  # with ties
    scores[0] = -torch.inf
    scores[1, : width // 2] = -torch.inf
    for k in (1, 10, 600):
        values, columns = top(scores, k)
        torch.testing.assert_close(values, scores.sort(descending=True).values[:, :k])
        torch.testing.assert_close(scores.gather(1, columns), values)
        assert all(len(set(row)) == len(row) for row in columns.tolist())


def test_alike_is_a_cosine_of_released_values():
    model = MODELS["ensemble"]()
    inside = model.network.chosen[1:].tolist()
    table = model.network.table.numpy()
    found = model.similar(inside[0]).numpy()
    one = table[1]
    for row, item in enumerate(inside, 1):
        other = table[row]
        assert found[item] == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other), abs=1e-5)
    assert (found > -np.inf).sum() == len(inside)
    only = next(item for item in model.transitions.head.tolist() if item not in inside)
    assert model.similar(only) is not None
    neither = next(n for n in range(1, ITEMS) if n not in inside and n not in model.transitions.head.tolist())
    assert model.similar(neither) is None
    assert MODELS["popularity"]().similar(1) is None
