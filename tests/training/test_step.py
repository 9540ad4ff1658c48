"""The guarantee in the loop: what a step does, against one user at a time through plain autograd in float64."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from dpformer.data import PoissonSampler, Sequences
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.privacy import PrivacyPlan, create_ledger, make_plan, noise_source, open_ledger, read_ledger
from dpformer.training.trainer import EMA, Optimisation, Trainer
from tests.training.conftest import small_recipe

ITEMS, LENGTH = 9, 5


def sequences(lengths: list[int], seed: int = 0) -> Sequences:
    random = np.random.default_rng(seed)
    items = random.integers(1, ITEMS + 1, sum(lengths)).astype(np.int32)
    return Sequences(pl.Series([str(n) for n in range(len(lengths))]), items, np.cumsum([0, *lengths]))


# A user with a single item, users longer than the greatest length, and enough of them for several micro-batches.
TRAIN = sequences([1, 2, 3, 4, 9, 5, 1, 2, 7, 3, 12, 6])
USERS = len(TRAIN)


def trainer(
    folder: Path, plan: PrivacyPlan | None = None, train: Sequences = TRAIN, how: Optimisation | None = None, **options
) -> Trainer:
    plan = plan or make_plan(len(train), 50, 1e-3, batch_size=max(1, len(train) // 2), steps=6)
    torch.manual_seed(3)
    kind = options.pop("model", "transformer")
    model = small_recipe(model=kind, max_length=LENGTH, **options).build(ITEMS).double()
    how = how or Optimisation(max_length=LENGTH, token_budget=16, weight_decay=0.0)
    ledger = create_ledger(folder, plan) if plan.private else None
    noise = noise_source("seeded", 5) if plan.private else None
    return Trainer(model, train, plan, how, PoissonSampler(plan.users, plan.rate, 7), noise, ledger)


def gradient_of_step(made: Trainer) -> dict[str, torch.Tensor]:
    """What the optimiser was given."""
    made.make_step()
    return {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}


def own_gradient(model: nn.Module, items: np.ndarray) -> list[torch.Tensor]:
    """One user's gradient, from the definition: the mean of -log softmax over the items that follow, real items only."""
    tokens = torch.from_numpy(items[-(LENGTH + 1) :].astype(np.int64))[None]
    parameters = list(model.parameters())
    if tokens.shape[1] < 2:
        return [torch.zeros_like(p) for p in parameters]
    logits = model(tokens[:, :-1])[0] @ model.table[1:].T
    loss = nn.functional.cross_entropy(logits, tokens[0, 1:] - 1)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def expected_gradient(made: Trainer, users: np.ndarray, divisor: float) -> dict[str, torch.Tensor]:
    """(1 / divisor) (sum_i c_i g_i + sigma C z), z replayed from the state of the noise source."""
    names = [name for name, _ in made.model.named_parameters()]
    total = [torch.zeros_like(p) for p in made.model.parameters()]
    C = made.how.max_norm
    for user in users:
        gradient = own_gradient(made.model, made.train[user])
        norm = float(torch.sqrt(sum(g.square().sum() for g in gradient)))
        factor = {"automatic": C / (norm + 0.01), "flat": min(1.0, C / max(norm, 1e-300))}[made.how.rule]
        factor = factor if made.plan.private else 1.0
        total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
    if made.plan.private:
        again = noise_source("seeded", 5)
        again.restore(made.noise.state())
        for name in sorted(names):
            place = names.index(name)
            z = torch.from_numpy(again.normal(total[place].numel())).reshape(total[place].shape)
            total[place] = total[place] + made.plan.noise_multiplier * C * z
    return {name: t / divisor for name, t in zip(names, total, strict=True)}


def next_batch(made: Trainer) -> np.ndarray:
    if made.plan.sampler == "full":
        return np.arange(made.plan.users)
    return PoissonSampler.restored(made.sampler.state()).draw()


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    difference = sum((a[name] - b[name]).square().sum() for name in b)
    return float(torch.sqrt(difference / sum(b[name].square().sum() for name in b)))


@pytest.mark.parametrize(
    ("model", "rule", "max_norm"),
    [("transformer", "automatic", 1.0), ("transformer", "flat", 0.5), ("gru", "automatic", 2.0), ("lstm", "flat", 1.0)],
)
def test_a_step_is_the_clipped_sum_and_noise_by_the_expected_batch(tmp_path, model, rule, max_norm):
    how = Optimisation(rule=rule, max_norm=max_norm, max_length=LENGTH, token_budget=16, weight_decay=0.0)
    made = trainer(tmp_path, how=how, model=model)
    checked = 0
    for _ in range(4):
        users = next_batch(made)
        expected = expected_gradient(made, users, made.plan.batch_size)
        by_realised = expected_gradient(made, users, len(users)) if len(users) else expected
        got = gradient_of_step(made)
        assert distance(got, expected) < 1e-5  # the clip's slack on the norm is 1e-6
        if len(users) not in (0, made.plan.batch_size):
            assert distance(got, by_realised) > 1e-2  # the planted defect: division by the realised size
            checked += 1
    assert checked


def test_a_full_batch_takes_everybody_and_a_run_without_privacy_neither_clips_nor_adds_noise(tmp_path):
    for epsilon, batch_size in ((50, USERS), (float("inf"), 6)):
        plan = make_plan(USERS, epsilon, 1e-3, batch_size=batch_size, steps=3)
        made = trainer(tmp_path / str(epsilon), plan)
        users = next_batch(made)
        expected = expected_gradient(made, users, batch_size)
        assert distance(gradient_of_step(made), expected) < 1e-5


def test_with_a_vocabulary_a_user_is_still_one_sample(tmp_path):
    """Everybody's items in the vocabulary, found without the trainer; a user left with none or one of them adds nothing."""
    plan = make_plan(USERS, 50, 1e-3, batch_size=USERS, steps=3)
    made = trainer(tmp_path, plan, vocabulary=4, popularity_bias=True, recency=0.8, identity=True)
    p = torch.full((ITEMS + 1,), 0.1, dtype=torch.float64)
    rows = {8: 1, 2: 2, 5: 3, 9: 4}
    for item, row in rows.items():
        p[item] = 1 - row / 10
    made.choose(p, bias=True)
    bias = (p[list(rows)] / p[1:].sum()).log()
    parameters = list(made.model.parameters())
    total = [torch.zeros_like(q) for q in parameters]
    silent = 0
    for items in TRAIN:
        known = torch.tensor([rows[i] for i in items.tolist() if i in rows], dtype=torch.int64)[-(LENGTH + 1) :]
        if len(known) < 2:
            silent += 1
            continue
        logits = made.model(known[None, :-1])[0] @ made.model.table[1:].T + bias
        found = torch.autograd.grad(nn.functional.cross_entropy(logits, known[1:] - 1), parameters)
        norm = float(torch.sqrt(sum(g.square().sum() for g in found)))
        total = [t + g / (norm + 0.01) for t, g in zip(total, found, strict=True)]
    assert silent
    names = [name for name, _ in made.model.named_parameters()]
    again = noise_source("seeded", 5)
    again.restore(made.noise.state())
    for name in sorted(names):
        t = total[names.index(name)]
        t += made.plan.noise_multiplier * torch.from_numpy(again.normal(t.numel())).reshape(t.shape)
    got = gradient_of_step(made)
    assert distance(got, {n: t / USERS for n, t in zip(names, total, strict=True)}) < 1e-5


def test_a_batch_of_people_without_known_items_is_a_step_of_noise_and_is_charged(tmp_path):
    plan = make_plan(USERS, 50, 1e-3, batch_size=USERS, steps=3)
    made = trainer(tmp_path, plan, train=Sequences(TRAIN.users, np.ones_like(TRAIN.items), TRAIN.offsets), vocabulary=1)
    p = torch.full((ITEMS + 1,), 0.1)
    p[2] = 1.0
    made.choose(p, bias=False)
    report = made.make_step()
    assert report.users == USERS
    assert len(read_ledger(tmp_path).entries) == 1
    assert all(q.grad.abs().sum() > 0 for q in made.model.parameters())


def test_noise_has_the_standard_deviation_of_the_plan(tmp_path):
    """Nobody has anything to learn from, so the gradient is noise alone: sigma C / B."""
    nothing = sequences([1] * 40)
    plan = make_plan(40, 10, 1e-3, batch_size=10, steps=40)
    made = trainer(tmp_path, plan, nothing, Optimisation(max_norm=0.5, max_length=LENGTH))
    drawn = torch.cat([g.flatten() for _ in range(20) for g in gradient_of_step(made).values()])
    expected = plan.noise_multiplier * 0.5 / 10
    # The relative error of a standard deviation from n values is 1 / sqrt(2 n).
    assert float(drawn.std()) == pytest.approx(expected, rel=4 / (2 * len(drawn)) ** 0.5)
    assert abs(float(drawn.mean())) < 4 * expected / len(drawn) ** 0.5
    assert len(drawn.unique()) > 0.99 * len(drawn)  # fresh at every step


def test_an_empty_batch_is_a_step_of_noise_and_is_charged(tmp_path):
    plan = make_plan(USERS, 50, 1e-3, batch_size=1, steps=30)
    made = trainer(tmp_path, plan)
    while len(next_batch(made)):
        made.make_step()
    before = read_ledger(tmp_path).steps_charged
    expected = expected_gradient(made, np.array([], dtype=np.int64), 1)
    report = made.make_step()
    got = {name: p.grad for name, p in made.model.named_parameters()}
    assert report.users == 0
    assert distance(got, expected) < 1e-6
    assert read_ledger(tmp_path).steps_charged == before + 1


def test_a_user_whose_loss_is_no_number_adds_nothing_and_is_counted(tmp_path):
    plan = make_plan(USERS, 50, 1e-3, batch_size=USERS, steps=3)
    made = trainer(tmp_path, plan)
    plain = made.worker.losses
    # Whoever begins with the items of user 4 gets a loss that is no number.
    first = torch.from_numpy(TRAIN[4][-(LENGTH + 1) :].astype(np.int64))

    def broken(tokens: torch.Tensor) -> torch.Tensor:
        hit = torch.tensor([torch.equal(row[: len(first)], first) for row in tokens])
        return plain(tokens) * torch.where(hit, torch.nan, 1.0)

    made.worker.losses = broken
    others = np.delete(np.arange(USERS), 4)
    expected = expected_gradient(made, others, USERS)
    report = made.make_step()
    got = {name: p.grad for name, p in made.model.named_parameters()}
    assert (report.users, report.nonfinite) == (USERS, 1)
    assert distance(got, expected) < 1e-5
    assert np.isfinite(report.loss)


def test_the_step_is_charged_before_its_noise_is_drawn(tmp_path):
    made = trainer(tmp_path)
    charged_at_draw = []
    plain = made.noise.normal

    def watched(count: int) -> np.ndarray:
        charged_at_draw.append(read_ledger(tmp_path).steps_charged)  # from the file: it has to be there
        return plain(count)

    made.noise.normal = watched
    made.make_step()
    made.make_step()
    tensors = len(list(made.model.parameters()))
    assert charged_at_draw == [1] * tensors + [2] * tensors


def test_a_ledger_that_cannot_be_written_keeps_the_step_from_being_made(tmp_path):
    made = trainer(tmp_path)
    before, noise = {n: p.detach().clone() for n, p in made.model.named_parameters()}, made.noise.state()
    made.ledger.close()
    with pytest.raises(PrivacyError, match="could not be written"):
        made.make_step()
    assert made.step == 0
    assert made.noise.state() == noise
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


def test_no_step_beyond_the_plan(tmp_path):
    made = trainer(tmp_path)
    assert len(list(made.run())) == 6
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    with pytest.raises(PrivacyError, match="step 7 is not between 1 and the plan's 6"):
        made.make_step()
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


def test_replayed_steps_are_free_and_redone_ones_are_charged_until_the_budget_ends(tmp_path):
    made = trainer(tmp_path)
    made.make_step()
    tensors, values = made.state()
    first = gradient_of_step(made)
    made.make_step()
    assert read_ledger(tmp_path).steps_charged == 3
    made.restore(tensors, values)
    assert distance(gradient_of_step(made), first) == 0
    assert read_ledger(tmp_path).steps_charged == 3
    made.restore(tensors, values)
    made.noise = noise_source("seeded", 99)
    made.make_step()
    assert read_ledger(tmp_path).steps_charged == 4
    with pytest.raises(PrivacyError, match="budget is spent: 6 of 6"):
        list(made.run())
    assert read_ledger(tmp_path).steps_charged == 6
    assert made.step == 4


def test_the_same_noise_for_another_batch_is_refused(tmp_path):
    made = trainer(tmp_path)
    tensors, values = made.state()
    made.make_step()
    other = PoissonSampler(USERS, made.plan.rate, 8).state()
    made.restore(tensors, {**values, "sampler": other})
    with pytest.raises(PrivacyError, match="would be used again"):
        made.make_step()


def test_the_same_noise_with_another_dropout_is_refused(tmp_path):
    made = trainer(tmp_path, dropout=0.3)
    tensors, values = made.state()
    made.make_step()
    made.restore(tensors, values)
    torch.rand(1)  # a callback, say
    with pytest.raises(PrivacyError, match="would be used again"):
        made.make_step()


def test_the_ledger_does_not_confirm_a_guess_of_the_data(tmp_path):
    """Everything but the noise is the same and known: were it hashed by itself, the ledger would say so."""
    entries = []
    for seed in (5, 6):
        made = trainer(tmp_path / str(seed))
        made.noise = noise_source("seeded", seed)
        made.make_step()
        entries.append(read_ledger(tmp_path / str(seed)).entries[0])
    assert entries[0].noise != entries[1].noise
    assert entries[0].inputs != entries[1].inputs


def test_what_does_not_fit_together_is_refused(tmp_path):
    made = trainer(tmp_path)
    parts = {
        "model": made.model,
        "train": TRAIN,
        "plan": made.plan,
        "how": made.how,
        "sampler": made.sampler,
        "noise": made.noise,
        "ledger": made.ledger,
    }
    Trainer(**parts)
    other_plan = make_plan(USERS, 40, 1e-3, batch_size=USERS // 2, steps=6)
    wrong = {
        "the data has 3": {"train": sequences([2, 2, 2])},
        "the sampler draws from 12 users with rate 0.25": {"sampler": PoissonSampler(USERS, 0.25, 1)},
        "the sampler draws from 13 users": {"sampler": PoissonSampler(USERS + 1, made.plan.rate, 1)},
        "needs a noise source and a ledger": {"noise": None},
        "needs a noise source and a ledger.": {"ledger": None},
        "ledger is of another plan": {"plan": other_plan},
        "comes from a seed": {"noise": noise_source("system")},
    }
    for message, change in wrong.items():
        with pytest.raises(PrivacyError, match=message.rstrip(".")):
            Trainer(**{**parts, **change})
    tensors, values = made.state()
    with pytest.raises(PrivacyError, match=r"rate 0\.25"):
        made.restore(tensors, {**values, "sampler": PoissonSampler(USERS, 0.25, 1).state()})
    with pytest.raises(PrivacyError, match="mode 'seeded'"):
        Trainer(**{**parts, "sampler": PoissonSampler(USERS, 0.5), "noise": noise_source("system")}).restore(
            tensors, {**values, "sampler": PoissonSampler(USERS, 0.5).state()}
        )
    made.ledger.close()
    with pytest.raises(DPFormerError, match="belongs to run"):
        open_ledger(tmp_path, run_id="another")


@pytest.mark.parametrize("averaging", ["none", "tail", "ema"])
def test_averages_are_those_of_the_iterates(tmp_path, averaging):
    plan = make_plan(USERS, 50, 1e-3, batch_size=6, steps=15)
    made = trainer(tmp_path, plan, how=Optimisation(averaging=averaging, max_length=LENGTH))
    iterates = []
    for _ in made.run():
        iterates.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    weights = {"none": [0.0] * 14 + [1.0], "tail": [0.0] * 12 + [1 / 3] * 3}
    weights["ema"] = [EMA**14] + [(1 - EMA) * EMA ** (14 - k) for k in range(1, 15)]
    expected = sum(w * x for w, x in zip(weights[averaging], iterates, strict=True))
    squares = made.finish()
    got = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert squares == pytest.approx(sum(w * w for w in weights[averaging]))


def test_the_learning_rate_rises_and_falls(tmp_path, monkeypatch):
    plan = make_plan(USERS, 50, 1e-3, batch_size=6, steps=10)
    made = trainer(tmp_path, plan, how=Optimisation(learning_rate=0.4, warmup=0.4, max_length=LENGTH))
    rates = []
    monkeypatch.setattr(made.optimizer, "step", rates.append)
    list(made.run())
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4 * 5 / 6, 0.4 * 4 / 6, 0.2, 0.4 * 2 / 6, 0.4 / 6])
