"""A network that learns from released statistics: it comes to score as they do, and nothing else is looked at."""

import pytest
import torch

from dpformer.fit.distil import choose_by, distil, sample, scores_at
from dpformer.models import GRU, RecurrentSpec, Transformer, TransformerSpec
from dpformer.statistics.settings import TransitionSettings
from tests.models.test_transitions import HISTORIES, ITEMS, batch, fitted


def network(vocabulary=ITEMS, items=ITEMS, **options):
    torch.manual_seed(1)
    size = {"items": items, "max_length": 8, "d": 16, "blocks": 1, "vocabulary": vocabulary}
    return Transformer(TransformerSpec(recency=1.2, identity=True, **size, **options))


def learn(model, prior, steps):
    for _ in distil(model, prior, steps):
        pass


def agreement(model, prior, s, lengths):
    """The mean over histories of the correlation of scores, over items of the prior's head."""
    head = prior.head
    with torch.no_grad():
        found, wanted = model.scores(s, lengths)[:, head], prior.scores(s, lengths)[:, head]
    return torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(found, wanted, strict=True)]).mean()


def test_it_comes_to_score_as_the_statistics_do():
    prior = fitted(settings=TransitionSettings(conditional=30.0))  # the lifts decide: scores with few peaks
    s, lengths = batch(*[[i, i % ITEMS + 1, (i + 4) % ITEMS + 1] for i in range(1, ITEMS + 1)])
    model = network()
    before = agreement(model, prior, s, lengths)
    learn(model, prior, 60)
    assert agreement(model, prior, s, lengths) > max(0.6, before + 0.3)


def test_the_teacher_is_the_statistics():
    prior, model = fitted(settings=TransitionSettings(head=30)), network()
    teacher = choose_by(model, prior)
    s, lengths = batch([3, 7, 1, 9], [2, 4])
    rows = torch.where(model.places()[s] > 0, model.places()[s], 0)
    inside = torch.isin(s, prior.head)
    assert bool(inside[0].any())
    for row, length, known, wanted in zip(rows, lengths, inside, prior.scores(s, lengths), strict=True):
        kept = row[:length][known[:length]][None]
        found = scores_at(teacher, kept, kept.shape[1] - 1)[0]
        for item in prior.head.tolist():
            assert found[model.places()[item]] == pytest.approx(float(wanted[item]), abs=1e-5)
    outside = torch.ones(len(found), dtype=torch.bool)
    outside[model.places()[prior.head]] = False
    assert bool((found[outside] == -torch.inf).all()), "rows outside the head, and the padding"


def test_sampled_histories_follow_the_transitions_and_repeat_nothing():
    prior, model = fitted(sigma=0.05), network()
    s = sample(choose_by(model, prior), 200, 6, torch.Generator().manual_seed(0))
    assert bool((s > 0).all())
    assert all(len(set(row)) == 6 for row in s.tolist())
    items = model.chosen[s]
    steps = (items[:, 1:] - items[:, :-1]) % ITEMS
    assert float((steps == 1).float().mean()) > 3 / ITEMS, "everybody walks up by one"


def test_the_vocabulary_is_the_priors_and_all_else_stands_below():
    prior, model = fitted(settings=TransitionSettings(head=12)), network(vocabulary=15)
    learn(model, prior, 5)
    head = set(prior.head.tolist())
    assert head <= set(model.chosen.tolist())
    bias = model.output_bias
    others = [item for item in range(1, ITEMS + 1) if item not in head]
    assert max(bias[others]) < min(bias[sorted(head)])
    assert sorted(others, key=lambda i: -bias[i]) == sorted(others, key=lambda i: -prior.tail[i])
    assert bool((model.scores(*HISTORIES)[:, 1:].isfinite()).all())
    assert bool((model.scores(*HISTORIES)[:, 0] == -torch.inf).all())


@pytest.mark.parametrize(
    "model", [network(vocabulary=None), network(tied=False), GRU(RecurrentSpec(kind="gru", items=ITEMS, d=8))]
)
def test_other_networks_learn_too(model):
    learn(model, fitted(), 3)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_it_is_the_same_every_time():
    prior, one, other = fitted(), network(), network()
    learn(one, prior, 3)
    torch.manual_seed(99)
    learn(other, prior, 3)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_head_of_one_item_teaches_nothing():
    model = network()
    learn(model, fitted(settings=TransitionSettings(head=1)), 3)
    assert bool(model.scores(*HISTORIES)[:, 1:].isfinite().all())
