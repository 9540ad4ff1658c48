"""Ranking and metrics against a plain sort, torchmetrics and an explicit bootstrap."""

import json
import math

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.retrieval import (
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_reciprocal_rank,
)

from dpformer.data import Sequences
from dpformer.errors import DataError, DPFormerError
from dpformer.evaluation import evaluate, held_out, metrics, rank
from dpformer.evaluation.evaluate import popularity_classes
from dpformer.evaluation.metrics import CUTOFFS
from dpformer.fit.scorers import count_events
from dpformer.models import Transformer, TransformerSpec, top

ITEMS = 30


def sequences(*rows) -> Sequences:
    items = np.array([item for row in rows for item in row], dtype=np.int32)
    return Sequences(pl.Series(range(len(rows))), items, np.cumsum([0, *map(len, rows)]))


def random_sequences(users=40, seed=0, items=ITEMS) -> Sequences:
    random = np.random.default_rng(seed)
    return sequences(*(random.integers(1, items + 1, random.integers(1, 15)) for _ in range(users)))


class Whole:
    """A model that is nothing but its scores of all items."""

    def __init__(self, item_count):
        self.item_count = item_count

    def candidates(self, best, allowed):
        return allowed.nonzero()[:, 0]

    def scorer(self, items):
        return lambda s, lengths: self.scores(s, lengths)[:, items]


class Table(Whole):
    """Scores by the sum of the history: any table of numbers can so be a model. Rows differ between users."""

    def __init__(self, items=ITEMS, seed=0, levels=None):
        super().__init__(items)
        random = np.random.default_rng(seed)
        values = (
            random.standard_normal((97, items + 1)) if levels is None else random.integers(0, levels, (97, items + 1))
        )
        self.values = torch.from_numpy(values).float()

    def scores(self, s, lengths):
        return self.values[s.sum(1) % 97]


def sorted_rank(scores: np.ndarray, target: int, seen: set[int]) -> int:
    """The place of the target in a full sort: by score, the target last among equals. Taken out, it is last of all."""
    if target in seen:
        return len(scores) - 1
    places = sorted(
        (item for item in range(1, len(scores)) if item not in seen), key=lambda item: (-scores[item], item == target)
    )
    return places.index(target)


@pytest.mark.parametrize("levels", [None, 3, 1])
@pytest.mark.parametrize("item", ["test", "validation"])
def test_ranks_are_those_of_a_full_sort(levels, item, monkeypatch):
    monkeypatch.setattr(top, "SCORES_AT_ONCE", 7 * (ITEMS + 1))
    model, held = Table(levels=levels), held_out(random_sequences(), item)
    found = rank(model, held, ITEMS)
    for kind in ("masked", "unmasked"):
        for n, user in enumerate(held.evaluated):
            history = held.histories[user]
            scores = model.values[history.sum() % 97].numpy()
            seen = set(history.tolist()) if kind == "masked" else set()
            assert found[kind].ranks[n] == min(sorted_rank(scores, held.targets[n], seen), 20)
            shown = found[kind].lists[n][found[kind].lists[n] > 0]
            others = [i for i in range(1, ITEMS + 1) if i not in seen]
            assert not seen & set(shown.tolist())
            assert np.array_equal(scores[shown], np.sort(scores[others])[::-1][:20])
            assert len(shown) == min(20, len(others))


def test_metrics_agree_with_torchmetrics():
    held, model = held_out(random_sequences(users=60), "test"), Table()
    found = rank(model, held, ITEMS)["unmasked"]
    given = metrics(found.ranks)
    for k in CUTOFFS:
        theirs = {"ndcg": [], "hit": [], "mrr": []}
        for n, user in enumerate(held.evaluated):
            # Their reciprocal rank takes scores below 0 for items that were not retrieved.
            scores = model.values[held.histories[user].sum() % 97][1:].sigmoid()
            relevant = torch.zeros(ITEMS, dtype=torch.bool)
            relevant[held.targets[n] - 1] = True
            theirs["ndcg"].append(float(retrieval_normalized_dcg(scores, relevant.long(), top_k=k)))
            theirs["hit"].append(float(retrieval_hit_rate(scores, relevant, top_k=k)))
            theirs["mrr"].append(float(retrieval_reciprocal_rank(scores, relevant, top_k=k)))
        for kind, values in theirs.items():
            assert math.isclose(given[f"{kind}@{k}"].value, np.mean(values), rel_tol=1e-6)
            assert 0 < np.mean(values) < 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_metrics_are_the_means_of_their_definitions(ranks):
    found = metrics(np.array(ranks))
    for k in CUTOFFS:
        assert math.isclose(found[f"hit@{k}"].value, np.mean([r < k for r in ranks]), abs_tol=1e-12)
        assert math.isclose(
            found[f"ndcg@{k}"].value, np.mean([(r < k) / math.log2(r + 2) for r in ranks]), abs_tol=1e-12
        )
        assert math.isclose(found[f"mrr@{k}"].value, np.mean([(r < k) / (r + 1) for r in ranks]), abs_tol=1e-12)
    for figure in found.values():
        assert figure.low <= figure.value + 1e-12
        assert figure.value <= figure.high + 1e-12


def test_the_interval_is_that_of_drawing_users_with_replacement():
    random = np.random.default_rng(0)
    ranks = random.geometric(0.03, 400) - 1
    gains = np.where(ranks < 10, 1 / np.log2(ranks + 2), 0)
    drawn = [gains[random.integers(0, 400, 400)].mean() for _ in range(4000)]
    found = metrics(ranks)["ndcg@10"]
    np.testing.assert_allclose([found.low, found.high], np.percentile(drawn, [2.5, 97.5]), rtol=0.03)


def test_the_interval_covers_the_truth_about_19_times_in_20():
    random = np.random.default_rng(0)
    truth = 1 - 0.97**10  # hit@10 of geometric ranks
    inside = 0
    for seed in range(200):
        figure = metrics(random.geometric(0.03, 500) - 1, seed)["hit@10"]
        inside += figure.low <= truth <= figure.high
    assert 180 <= inside <= 200


def test_ties_and_what_is_no_number_count_against_the_model():
    class Constant(Whole):
        def __init__(self, value):
            super().__init__(5)
            self.value = value

        def scores(self, s, lengths):
            return torch.full((len(s), 6), self.value)

    held = held_out(sequences([1, 2, 3]), "test")
    assert rank(Constant(1.0), held, 5)["unmasked"].ranks.tolist() == [4]
    assert rank(Constant(1.0), held, 5)["masked"].ranks.tolist() == [2]
    assert rank(Constant(math.nan), held, 5)["unmasked"].ranks[0] >= 4
    assert rank(Constant(-math.inf), held, 5)["unmasked"].ranks[0] >= 4
    assert rank(Constant(-math.inf), held, 5, depth=2)["masked"].ranks.tolist() == [2]


def test_a_target_that_stands_in_the_history_is_missed_when_masked():
    held = held_out(sequences([3, 1, 3]), "test")
    found = rank(count_events(sequences([3, 3, 3, 1]), 40), held, 40)
    assert found["unmasked"].ranks.tolist() == [0]
    assert found["masked"].ranks[0] == 20
    assert 3 not in found["masked"].lists


def test_what_is_held_out():
    given = sequences([1, 2, 3, 4], [5, 6], [7, 8, 9])
    test, validation = held_out(given, "test"), held_out(given, "validation")
    assert [list(row) for row in test.histories] == [[1, 2, 3], [5, 6], [7, 8]]
    assert [list(row) for row in validation.histories] == [[1, 2], [5, 6], [7]]
    assert test.targets.tolist() == [4, 9]
    assert validation.targets.tolist() == [3, 8]
    assert test.evaluated.tolist() == validation.evaluated.tolist() == [0, 2]
    with pytest.raises(DataError, match="test, validation"):
        held_out(given, "train")


def test_slices_divide_the_users_by_the_popularity_of_their_target():
    counts = np.array([0, 10, 50, 5, 30, 5])
    assert popularity_classes(counts).tolist()[1:] == [2, 0, 2, 1, 2]
    held = held_out(random_sequences(users=200), "test")
    found = evaluate(Table(), held, ITEMS)
    assert list(found.slices) == ["head", "torso", "tail"]
    assert sum(part.users for part in found.slices.values()) == len(held.evaluated)
    assert sum(part.items for part in found.slices.values()) == ITEMS
    mean = sum(part.users * part.metrics["hit@10"].value for part in found.slices.values()) / len(held.evaluated)
    assert math.isclose(mean, found.masked["hit@10"].value)


def test_coverage_and_mean_popularity():
    held = held_out(sequences([1, 2, 3], [4, 2, 1], [2, 5, 6]), "test")
    model = count_events(held.histories, 100)
    found = evaluate(model, held, 100)
    ranked = rank(model, held, 100)["masked"]
    shown = {item for row in ranked.lists for item in row[:5]}
    assert found.coverage["coverage@5"] == len(shown) / 100
    events = np.bincount(held.histories.items, minlength=101)
    assert math.isclose(found.mean_popularity["popularity@5"], np.mean(events[ranked.lists[:, :5]]) / 3)


def test_the_protocol_stands_beside_the_figures():
    held = held_out(sequences([1, 2, 3], [1, 2]), "validation")
    found = evaluate(count_events(held.histories, 1234), held, 1234).figures()
    for part in ("second to last", "1,234 items", "all 1 users (1 users with", "masked", "ties", "no sampling"):
        assert part in found["protocol"]
    assert json.loads(json.dumps(found))["masked"]["ndcg@10"].keys() == {"value", "low", "high"}


def test_nobody_to_evaluate_and_fewer_items_than_the_cutoff():
    found = evaluate(count_events(sequences([1]), 2), held_out(sequences([1]), "test"), 2)
    assert math.isnan(found.masked["ndcg@10"].value)
    found = evaluate(count_events(sequences([2]), 2), held_out(sequences([1, 1, 2]), "test"), 2)
    assert found.masked["hit@5"].value == 1


def test_a_model_of_another_catalogue_is_refused():
    with pytest.raises(DPFormerError, match="fit it on the catalogue"):
        rank(Table(items=7), held_out(random_sequences(), "test"), ITEMS)


def test_a_transformer_is_ranked_like_any_model():
    torch.manual_seed(0)
    model = Transformer(TransformerSpec(items=ITEMS, max_length=8, d=8)).eval()
    held = held_out(random_sequences(), "test")
    found = rank(model, held, ITEMS)
    for n, user in enumerate(held.evaluated):
        history = torch.from_numpy(held.histories[user][-8:].astype(np.int64))[None]
        with torch.no_grad():
            scores = model.scores(history, torch.tensor([history.shape[1]]))[0]
        assert found["unmasked"].ranks[n] == min((scores > scores[held.targets[n]]).sum(), 20)
