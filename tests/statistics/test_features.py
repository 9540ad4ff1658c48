"""Public features: how columns are encoded, what they predict, and what the scorer makes of it, against plain loops."""

import sys

import numpy as np
import pytest
import torch

from dpformer.data.features import LEAST, MOST, encode
from dpformer.errors import DataError
from dpformer.fit.scorers import to_scorer
from dpformer.statistics.combine import Measured, popularity_product
from dpformer.statistics.features import Predicted
from dpformer.statistics.low_rank import held_out_low_rank
from dpformer.statistics.posterior import posterior_means
from dpformer.statistics.score_matrix import FEATURE_WEIGHTS, Judge, score_matrix
from dpformer.statistics.settings import TransitionSettings

GENRES, HEAD, NEW = 3, 60, 9
SETTINGS = TransitionSettings(rank=4, folds=2)


def genre(item):
    return (item - 1) % GENRES


def measured(lift=4.0, noise=1.0, seed=0, head=HEAD, unchosen=0):
    """A head of 60 items in three genres, people who stay in theirs, and nine items that nobody chose yet.

    unchosen: how many items of the head nobody chose either.
    """
    random = np.random.default_rng(seed)
    items = np.arange(1, head + 1)
    h = np.linspace(90.0, 30.0, head)
    h[head - unchosen :] = 1e-6
    same = genre(items)[:, None] == genre(items)
    exact = np.outer(h, h) / h.sum() * np.where(same, lift, 1.0)
    h = np.maximum(h, 2.0)
    np.fill_diagonal(exact, 0.0)
    variance = np.full((head, head), noise**2)
    np.fill_diagonal(variance, np.inf)
    counts = exact + noise * random.standard_normal(exact.shape) * ~np.eye(head, dtype=bool)
    return Measured(np.concatenate([[0.0], h, np.zeros(NEW)]), items, h, counts, variance, noise, (1.0,))


def encoded():
    return encode({"genre": [f"g{genre(item)}" for item in range(1, HEAD + NEW + 1)]})


def test_columns_are_encoded_by_value_list_and_bin():
    columns = {
        "genre": ["a|b", " a ", "b", "a", None, "a|b", "a", "b", "b", "", "rare"],
        "tags": [["x"], ["x", "x"], ["x"], ["x"], ["x"], [], None, [], [], [], []],
        "price:2": [1, 2.5, 3, "4", 5, 60, 70, 80, 90, 100, None],
    }
    found = encode(columns)
    assert found.shape == (12, 5)
    assert not found[0].any()
    wanted = [[0, 1, 3, 5, 6], [0, 2, 5, 7, 8], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert sorted(np.flatnonzero(column).tolist() for column in found[1:].T) == sorted(wanted)
    many = encode({"brand": [str(n // LEAST) for n in range(LEAST * (MOST + 5))]})
    assert many.shape[1] == MOST


def test_spelling_does_not_change_the_encoding():
    one, other = ["2020-01-01 00:00"] * 6 + ["2019"] * 7, ["a"] * 6 + ["z"] * 7
    assert np.array_equal(encode({"day": one}), encode({"day": other}))


@pytest.mark.parametrize(
    ("columns", "cure"),
    [
        ({"title": [f"t{n}" for n in range(9)]}, "title:10"),
        ({"price:3": [1, 2, "cheap"]}, "'cheap' is not a number.*use price without bins"),
        ({"list price:3": [1, "12,99"]}, "features='list price:3': '12,99' is not a number; write numbers as 12.99"),
        ({"price:3": [None] * 9}, "leave it out"),
    ],
)
def test_a_column_that_predicts_nothing_is_refused_with_the_cure(columns, cure):
    with pytest.raises(DataError, match=cure):
        encode(columns)


def test_the_prediction_is_that_of_two_ridge_regressions():
    random = np.random.default_rng(3)
    own = encode({"a": [str(n % 4) for n in range(40)], "b": [str(n % 3) for n in range(40)]})
    head = random.permutation(40)[:25] + 1
    M = random.standard_normal((25, 25))
    x = own - own[head].mean(0)
    y = np.concatenate([np.ones((41, 1)), x], 1)

    def predict(rows, values, at, free):
        penalty = 10.0 * np.eye(rows.shape[1])
        penalty[range(free), range(free)] = 0
        return at @ np.linalg.inv(rows.T @ rows + penalty) @ rows.T @ values

    by_column = predict(x[head], M.T, x[1:], 0).T
    wanted = predict(y[head], by_column, y[1:], 1)
    found = Predicted(own, head, M)
    np.testing.assert_allclose((found.sources @ found.targets.T)[1:, 1:], wanted, atol=1e-5)
    np.testing.assert_allclose(found.scores, wanted[np.ix_(head - 1, head - 1)], atol=1e-5)
    assert not found.sources[0].any()


def test_an_item_without_values_is_an_average_one():
    own = encode({"a": [str(n % 4) for n in range(40)] + [None]})
    found = Predicted(own, np.arange(1, 31), np.random.default_rng(1).standard_normal((30, 30)))
    assert not found.targets[41].any()
    np.testing.assert_allclose(found.sources[41], found.sources[1:31].mean(0), atol=0.2)


def test_the_scorer_adds_what_features_predict():
    """Score = (1 + w) f, and K (M - f) within the head, over the last 15 items, newest first, plus popularity."""
    known, own = measured(), encoded()
    M = score_matrix(known, SETTINGS)
    M = (M - M.sum(1, keepdims=True) / (HEAD - 1)) * ~np.eye(HEAD, dtype=bool)
    f = Predicted(own, known.head, M)
    w = Judge.of(known, SETTINGS).feature_weight(own, known.head, Judge.of(known, SETTINGS).conditional_weight())
    assert w in FEATURE_WEIGHTS
    pairs = (1 + w) * f.sources @ f.targets.T
    pairs[np.ix_(known.head, known.head)] += kept(known) * (M - f.scores)
    popularity = np.concatenate([known.h, np.full(NEW, known.h.min() / 10)])
    history = [*range(50, 70), 3, 61, 8]
    wanted = 0.1 * np.log(popularity / known.h.mean())
    for k, item in enumerate(history[::-1][:15], 1):
        wanted += pairs[item, 1:] / k
    model = to_scorer(known, SETTINGS, own)
    tokens, lengths = torch.tensor([history, [0] * len(history)]), torch.tensor([len(history), 0])
    scores = model.scores(tokens, lengths)
    np.testing.assert_allclose(scores[0, 1:], wanted, atol=1e-4)
    np.testing.assert_allclose(scores[1, 1:], 0.1 * np.log(popularity / known.h.mean()), atol=1e-5)
    assert scores[0, 0] == -torch.inf


def kept(known):
    """K = x / (x + .05 sd), with the posterior mean x of each count among cells of a like prediction; 0 on the diagonal."""
    C, sd, off = known.counts, np.sqrt(known.variance), ~np.eye(HEAD, dtype=bool)
    P = popularity_product(C, known.variance, known.h)
    z = (C - P) / sd
    like = P + known.noise * held_out_low_rank((z + z.T) / 2, known.h, SETTINGS.rank, SETTINGS.ridge, SETTINGS.folds)
    x = posterior_means(C[off], sd[off], like[off], lambda grid, _: grid[None])[0]
    K = np.zeros_like(C)
    K[off] = x / (x + 0.05 * sd[off])
    return K


def test_an_item_of_the_head_that_nobody_chose_is_recommended_by_its_features():
    """A small catalogue is in the head as a whole. Planted: scores without K, which order such items by noise."""
    head, count = 240, 30
    own = encode({"genre": [f"g{genre(item)}" for item in range(1, head + NEW + 1)]})
    first, new = np.arange(1, head - count + 1), torch.arange(head - count + 1, head + 1)

    def right(**planted):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in planted.items():
                patch.setattr(sys.modules[score_matrix.__module__], name, value)
            share = []
            for seed in range(3):
                model = to_scorer(measured(1.5, 1.0, seed, head, count), SETTINGS, own)
                scores = model.scores(torch.from_numpy(first)[:, None], torch.ones(len(first), dtype=torch.int64))
                best = new[scores[:, new].topk(4, 1).indices].numpy()
                share.append((genre(best) == genre(first)[:, None]).mean())
        return np.mean(share)

    assert right() > 0.85
    assert right(HALF_KEPT=1e-9) < 0.75


def test_an_item_that_nobody_chose_is_recommended_by_its_features():
    known, own = measured(), encoded()
    model = to_scorer(known, SETTINGS, own)
    first = model.scores(torch.tensor([[2, 5, 8]]), torch.tensor([3]))[0]
    new = torch.arange(HEAD + 1, HEAD + NEW + 1)
    best = new[first[new].topk(NEW // GENRES).indices]
    assert set(genre(best.numpy())) == {genre(2)}
    assert first[best].min() > first[[n for n in range(1, HEAD + 1) if genre(n) != genre(2)]].max()
    alike = model.similar(int(best[0]))
    assert genre(int(alike[1:].argmax()) + 1) == genre(2)
    plain = to_scorer(known, SETTINGS)
    assert set((plain.scores(torch.tensor([[2]]), torch.tensor([1]))[0].topk(HEAD).indices <= HEAD).tolist()) == {True}
    assert plain.similar(int(best[0])) is None


@pytest.mark.parametrize(("lift", "least", "most"), [(4.0, 0.1, 1.0), (1.0, 0.0, 0.01)])
def test_features_explain_as_much_as_they_say(lift, least, most):
    M = score_matrix(measured(lift), SETTINGS)
    M -= M.mean(1, keepdims=True)
    explained = np.var(Predicted(encoded(), measured().head, M).scores) / np.var(M)
    assert least <= explained <= most


def test_what_the_network_learns_from_has_the_features_in_its_matrix():
    known, own = measured(), encoded()
    model = to_scorer(known, SETTINGS, own)
    rows = torch.cat([torch.arange(HEAD + 1), torch.zeros(NEW, dtype=torch.int64)])
    teacher = model.renumbered(rows, HEAD)
    tokens, lengths = torch.tensor([[4, 9, 17]]), torch.tensor([3])
    found = teacher.scores(tokens, lengths)
    np.testing.assert_allclose(found, model.scores(tokens, lengths)[:, : HEAD + 1], atol=1e-5)
    more = model.with_others(1.5).scores(tokens, lengths)
    np.testing.assert_allclose(more[:, : HEAD + 1], model.scores(tokens, lengths)[:, : HEAD + 1], atol=1e-6)
    tail = model.tail[HEAD + 1 :]
    np.testing.assert_allclose(
        more[0, HEAD + 1 :] - tail, 1.5 * (model.scores(tokens, lengths)[0, HEAD + 1 :] - tail), atol=1e-5
    )
