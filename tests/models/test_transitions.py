"""The transition statistics as a model: post-processing of releases alone, scores as the formula has them, odd logs."""

from functools import partial

import numpy as np
import pytest
import torch

from dpformer.data import demo_frame, prepare
from dpformer.evaluation import evaluate, held_out
from dpformer.fit.scorers import count_events
from dpformer.models import parse_spec, restore
from dpformer.privacy import Curator, Keys, create_ledger, make_plan
from dpformer.statistics import low_rank
from dpformer.statistics import posterior as bayes
from dpformer.statistics.settings import TransitionSettings
from tests.asking import Asking, Replay
from tests.people import people
from tests.statistics.fits import POPULARITY_SHARES, all_shares, fit_all, fit_popularity, measure_all

ITEMS = 40


def planted(users=300, seed=0, items=ITEMS):
    """Everybody walks up by one, with a jump now and then; low numbers are the more popular ones to jump to."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(users):
        item, walk = 1, []
        for _ in range(random.integers(3, 25)):
            item = int(items * random.random() ** 2) + 1 if random.random() < 0.3 else item % items + 1
            walk.append(item)
        sequences.append(walk)
    return people(sequences)


def fitted(log=None, settings=None, sigma=0.5, count=ITEMS, seed=0):
    return fit_all(asking(log, settings, sigma, seed), count, settings)


def asking(log=None, settings=None, sigma=0.5, seed=0):
    return Asking(planted() if log is None else log, sigma, all_shares(settings), seed)


def batch(*histories):
    width = max(map(len, histories), default=0)
    rows = [[*map(int, history), *[0] * (width - len(history))] for history in histories]
    s = torch.tensor(rows, dtype=torch.int64).reshape(len(histories), width)
    return s, torch.tensor([len(history) for history in histories])


HISTORIES = batch([1, 2, 3], [], [ITEMS], list(range(1, 30)), [5, 5, 5])


def test_a_fit_depends_on_people_through_the_answers_alone():
    """Made again from the recorded answers, without any data: the same scores, to the last bit."""
    settings = TransitionSettings(head=20)
    asker = Asking(planted(seed=1), 0.5, all_shares(settings))
    first = fit_all(asker, ITEMS, settings)
    second = fit_all(Replay(asker.answers), ITEMS, settings)
    torch.testing.assert_close(second.scores(*HISTORIES), first.scores(*HISTORIES), rtol=0, atol=0)
    # The control: with answers of its own, another log gives other scores.
    third = fitted(planted(users=17, seed=2), settings)
    assert not torch.allclose(third.scores(*HISTORIES), first.scores(*HISTORIES))


def test_the_same_noise_gives_the_same_model_and_other_noise_another():
    first = fitted().scores(*HISTORIES)
    torch.testing.assert_close(fitted().scores(*HISTORIES), first, rtol=0, atol=0)
    assert not torch.allclose(fitted(seed=1).scores(*HISTORIES), first)


def test_the_state_holds_what_scores_need_and_nothing_of_the_size_of_the_log():
    model = fitted(settings=TransitionSettings(head=20))
    state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "head": (20,),
        "matrix": (21, 20),
        "prior": (20,),
        "tail": (ITEMS + 1,),
    }
    again = restore(parse_spec(model.spec.model_dump(mode="json")), state)
    torch.testing.assert_close(again.scores(*HISTORIES), model.scores(*HISTORIES), rtol=0, atol=0)


def test_scores_are_what_the_formula_says():
    settings = TransitionSettings(head=20, window=4)
    model, histogram = fitted(settings=settings), measure_all(asking(settings=settings), ITEMS, settings).histogram
    state, random = model.state_dict(), np.random.default_rng(3)
    place = {int(item): n for n, item in enumerate(state["head"])}
    histories = [list(random.integers(1, ITEMS + 1, n)) for n in (0, 1, 3, 12, 12)]
    given = model.scores(*batch(*histories))
    assert given.dtype == torch.float32
    for row, history in zip(given, histories, strict=True):
        expected = state["prior"].clone()
        recent = [place[item] for item in history if item in place][-4:]
        for k, i in enumerate(reversed(recent), 1):
            expected += state["matrix"][i] / k
        torch.testing.assert_close(row[state["head"]], expected)
        # Items outside the head come after it, by the noisy histogram.
        outside = [item for item in range(1, ITEMS + 1) if item not in place]
        ranked = sorted(outside, key=lambda item: -row[item].item())
        assert row[outside].max() < row[state["head"]].min()
        assert ranked == sorted(outside, key=lambda item: -histogram[item])
        assert row[0] == -torch.inf


def test_a_history_scores_the_same_alone_and_among_longer_ones():
    model = fitted()
    together = model.scores(*HISTORIES)
    alone = model.scores(*batch([1, 2, 3]))
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=0)


def test_what_stands_after_the_length_does_not_count():
    model = fitted()
    s = torch.tensor([[1, 2, 7, 8]])
    torch.testing.assert_close(model.scores(s, torch.tensor([2])), model.scores(*batch([1, 2])), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("sequences", "count"),
    [
        ([], 5),
        ([[]], 5),
        ([[], [3], [4]], 5),
        ([[1, 1, 1, 1]], 5),
        ([[1]], 1),
        ([[1, 1], [1]], 1),
        ([[1, 2], [2, 1]], 2),
        ([[0, 1, 0, 2]], 3),
        ([list(range(1, 31)) * 100], 30),
    ],
    ids=["nobody", "no events", "no pairs", "repeats", "one item", "one item, repeats", "two", "padding", "very long"],
)
@pytest.mark.parametrize("settings", [TransitionSettings(), TransitionSettings.one_stage(), TransitionSettings(head=2)])
@pytest.mark.parametrize("sigma", [0.5, 1e-3, 1e3])
def test_odd_logs_give_finite_scores_for_every_item(sequences, count, settings, sigma):
    model = fitted(people(sequences), settings, sigma, count)
    scores = model.scores(*batch([], [count], [1] * 40))
    assert scores.shape == (3, count + 1)
    assert torch.isfinite(scores[:, 1:]).all()


def test_the_head_grows_with_the_people_beyond_60_000():
    assert [TransitionSettings().head_size(4.0, users) for users in (60_000, 240_000, 600_000)] == [530, 1060, 1676]
    assert TransitionSettings().head_size(0.6, 10**7) == 3000


@pytest.mark.parametrize(("sigma", "size"), [(1.0, 1060), (0.5, 1499), (4.0, 530), (1e-9, 3000), (1e9, 1)])
def test_the_head_grows_as_the_noise_falls(sigma, size):
    assert TransitionSettings().head_size(sigma, 200) == TransitionSettings().head_size(sigma, 60_000) == size
    assert TransitionSettings(head=7).head_size(sigma, 200) == 7
    assert len(fitted(sigma=sigma).head) == min(size, ITEMS)


def test_an_empty_history_is_ranked_by_the_noisy_histogram():
    settings = TransitionSettings(head=10)
    model, histogram = fitted(settings=settings), measure_all(asking(settings=settings), ITEMS, settings).histogram
    ranked = model.scores(*batch([]))[0].argsort(descending=True)[:-1]
    assert ranked.tolist() == (1 + np.argsort(-histogram[1:])).tolist()


def test_planted_transitions_are_found_where_popularity_finds_nothing():
    model = fitted(planted(users=2000), sigma=0.5)
    follows = model.scores(*batch(*[[item] for item in range(1, 16)])).argmax(1)
    assert (follows == torch.arange(2, 17)).sum() >= 14


def test_popularity_counts_events():
    scores = count_events(people([[1, 2, 2], [3, 2, 3]]), 4).scores(*batch([1], []))
    assert scores.tolist() == [[-np.inf, 1, 3, 2, 0]] * 2


def test_dp_popularity_is_the_histogram_and_noise():
    """Two users with 1 and 4 distinct items: their items weigh 1 and 1/2."""
    log = people([[1, 1], [1, 2, 3, 4]])
    exact = fit_popularity(Asking(log, 1.0, POPULARITY_SHARES, seed=None), 5)
    np.testing.assert_allclose(exact.scores(*batch([1]))[0, 1:], [1.5, 0.5, 0.5, 0.5, 0], rtol=1e-6)
    asker = Asking(log, 2.0, POPULARITY_SHARES)
    noisy = fit_popularity(asker, 5)
    np.testing.assert_allclose(noisy.counts[1:], asker.answers[0].values["histogram"][1:], rtol=1e-6)
    assert noisy.counts[0] == -np.inf
    again = restore(noisy.spec, noisy.state_dict())
    torch.testing.assert_close(again.scores(*HISTORIES), noisy.scores(*HISTORIES))
    # Below the noise a count cannot be told from none.
    assert noisy.popularity()[0] == 0
    assert noisy.popularity()[1:].min() >= asker.answers[0].noise_std * (1 - 1e-6)


def test_on_the_embedded_data_transitions_clearly_beat_popularity(tmp_path):
    """Through a Curator and a ledger, at epsilon 8."""
    dataset = prepare(demo_frame())
    held, count = held_out(dataset.sequences, "test"), len(dataset.catalogue)

    def private(fit, shares):
        plan = make_plan(len(held.histories), 8.0, 1e-5, shares=shares)
        with create_ledger(tmp_path / str(len(list(tmp_path.iterdir()))), plan) as ledger:
            return fit(Curator(held.histories, plan, ledger, Keys(seed=0)), count)

    one_stage = TransitionSettings.one_stage()

    models = {
        "popularity": count_events(held.histories, count),
        "dp popularity": private(fit_popularity, POPULARITY_SHARES),
        "one stage": private(partial(fit_all, settings=one_stage), all_shares(one_stage)),
        "three stages": private(fit_all, all_shares()),
    }
    ndcg = {name: evaluate(model, held, count).masked["ndcg@10"] for name, model in models.items()}
    assert ndcg["dp popularity"].value > 0.8 * ndcg["popularity"].value
    assert ndcg["one stage"].low > 1.5 * ndcg["popularity"].high
    assert ndcg["three stages"].low > 1.5 * ndcg["popularity"].high


def test_each_cell_is_predicted_without_itself():
    random = np.random.default_rng(0)
    half = random.standard_normal((30, 30))
    E, h = half + half.T, random.random(30) + 0.5
    before = low_rank.held_out_low_rank(E, h, 3, 1.0, 4)
    E[3, 7] += 100
    E[7, 3] += 100
    after = low_rank.held_out_low_rank(E, h, 3, 1.0, 4)
    assert after[3, 7] == before[3, 7]
    assert after[7, 3] == before[7, 3]
    assert not np.allclose(after[3, 8:], before[3, 8:])


def test_a_low_rank_matrix_is_recovered_from_noise():
    random = np.random.default_rng(0)
    u = random.standard_normal((150, 2))
    truth = 2 * u @ u.T
    noise = random.standard_normal((150, 150))
    found = low_rank.held_out_low_rank(truth + (noise + noise.T) / 2, np.ones(150), 8, 3.0, 4)
    off = ~np.eye(150, dtype=bool)
    assert np.corrcoef(found[off], truth[off])[0, 1] > 0.98


def test_posterior_means_are_those_of_the_true_prior():
    """x is 0 or 6 or 30, noise of two sizes: empirical Bayes, which is not told so, comes close to Bayes, which is."""
    random = np.random.default_rng(0)
    n, support, prior = 40_000, np.array([0.0, 6.0, 30.0]), np.array([0.8, 0.15, 0.05])
    x = random.choice(support, n, p=prior)
    sd = random.choice([1.5, 3.0], n)
    y = x + sd * random.standard_normal(n)
    weight = prior * np.exp(-0.5 * ((y[:, None] - support) / sd[:, None]) ** 2)
    bayes_rule = weight @ support / weight.sum(1)
    found = bayes.posterior_means(y, sd, np.zeros(n), lambda grid, members: np.stack([grid, grid > 3]))
    risk = {
        name: np.mean((estimate - x) ** 2) for name, estimate in {"raw": y, "eb": found[0], "bayes": bayes_rule}.items()
    }
    assert risk["bayes"] <= risk["eb"] < 1.25 * risk["bayes"]
    assert risk["eb"] < 0.5 * risk["raw"]
    assert np.abs(found[1] - weight[:, 1:].sum(1) / weight.sum(1)).mean() < 0.02


def test_posterior_means_stay_finite_far_from_the_grid():
    y = np.array([0.0, 1e6, -50.0, 12345.0] * 1000)
    found = bayes.posterior_means(y, np.full(4000, 1e-3), y, lambda grid, members: grid[None])
    assert np.isfinite(found).all()
    assert found[0, 1] > 5e5
