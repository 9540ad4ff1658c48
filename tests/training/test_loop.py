"""PrivateTraining: its sums, noise, draws and cost, against what is computed independently; planted defects are noticed."""

import math
from functools import partial

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import nn

from dpformer.errors import ClippingError, PrivacyError
from dpformer.privacy import Answer, Curator, read_ledger
from dpformer.privacy.account import Cap, PeopleAccount
from dpformer.privacy.noise import poisson_draw, rounded_gaussian
from dpformer.training import PrivateTraining
from tests.privacy import test_poisson
from tests.privacy.test_poisson import check_poisson
from tests.training.support import EXACT, PEOPLE, WIDTH, Rows, begin, losses, no_noise, small_model, train, weights
from tests.training.test_module_sum import one_at_a_time


def test_a_step_subtracts_the_clipped_sum_over_the_expected_batch_size(tmp_path):
    private = begin(tmp_path / "run", rate=1.0, steps=1, batch_size=30, make_curator=EXACT)
    before = small_model()
    (drawn,) = train(private)
    expected = one_at_a_time(before, Rows().rows, np.array(drawn), 0.5)
    for (name, old), new in zip(before.named_parameters(), private.model.parameters(), strict=True):
        moved = (old - new).detach().numpy()
        np.testing.assert_allclose(moved, expected[name] / 30, atol=2e-6)
    assert len(drawn) != 30, "the expected batch size and the realised one must differ for this test"
    assert private.report.users == len(drawn)


def test_the_statement_has_the_epsilon_of_an_independent_accountant(tmp_path):
    private = begin(tmp_path / "run", steps=4, batch_size=30)
    train(private)
    said = private.statement
    accountant = PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(30 / PEOPLE, dp_accounting.GaussianDpEvent(said.steps.noise_multiplier))
    accountant.compose(step, said.steps.charged)
    assert said.steps.charged == said.steps.planned == 4
    assert said.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    assert said.epsilon <= 8
    assert "one user" in said.text()
    assert private.steps_made == read_ledger(tmp_path / "run").steps_charged == 4


# --- noise --------------------------------------------------------------------------------------------------------------


def noise_of(tmp_path, make_curator) -> tuple[dict[str, torch.Tensor], float]:
    """The noise on each parameter of a wide model in which nobody has a gradient, in units of the deviation promised."""
    model = nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 1))
    before = [p.detach().clone() for p in model.parameters()]
    private = begin(tmp_path / "run", model, rate=1.0, steps=1, max_norm=0.5, batch_size=30, make_curator=make_curator)
    for batch in private:
        private.step(lambda batch=batch: 0 * model(batch[1])[:, 0])
    std = private.statement.steps.noise_multiplier * 0.5 / 30
    moved = zip(model.named_parameters(), before, strict=True)
    return {name: (p.detach() - old) / std for (name, p), old in moved}, std


def check_noise(noise: dict[str, torch.Tensor]) -> None:
    """The mean square of n Gaussians is within six standard errors of 1; a slack of 1e-4 is part of the noise."""
    for name, values in noise.items():
        n = values.numel()
        low, high = (stats.chi2.ppf(p, n) / n for p in (1e-9, 1 - 1e-9))
        assert low < float(values.double().square().mean()) < high * 1.001, name


def test_every_parameter_gets_the_noise_of_the_plan(tmp_path):
    noise, _ = noise_of(tmp_path, Curator)
    check_noise({name: values for name, values in noise.items() if values.numel() > 1})
    assert all(bool(values.any()) for values in noise.values())


class Unnoised(Curator):
    """A planted defect: one parameter is answered without noise."""

    def ask(self, query) -> Answer:
        answer = super().ask(query)
        return Answer(answer.name, {**answer.values, "0.weight": np.zeros((300, WIDTH))}, answer.noise_std, answer.grid)


@pytest.mark.parametrize(
    "defect", [partial(Curator, noise=lambda key, shape, std: rounded_gaussian(key, shape, std / 2)), EXACT, Unnoised]
)
def test_less_noise_is_noticed(tmp_path, defect):
    noise, _ = noise_of(tmp_path, defect)
    with pytest.raises(AssertionError):
        check_noise(noise)


# --- draws --------------------------------------------------------------------------------------------------------------


def draws_of(tmp_path, monkeypatch, draw) -> None:
    """Who is in the batches of a long run must pass the test of Poisson sampling. Nothing is trained, so that it is quick."""
    monkeypatch.setattr(test_poisson, "USERS", 40)
    monkeypatch.setattr(test_poisson, "STEPS", 400)
    model = nn.Linear(WIDTH, 1)
    options = {"steps": 400, "batch_size": 12, "dataset": Rows(40), "micro_batch": 5, "checkpoint_seconds": math.inf}
    private = begin(tmp_path / "run", model, epsilon=math.inf, make_curator=partial(Curator, draw=draw), **options)
    batches = iter(private)
    made = 0

    def one() -> np.ndarray:
        """The people of the next step."""
        nonlocal made
        made, drawn = made + 1, []
        while private.steps_made < made:
            batch = next(batches)
            assert private.steps_made < made, "an empty draw, which is a step without a batch; choose a larger rate"
            drawn += batch[0].tolist()
            private.step(lambda batch=batch: 0 * model(batch[1])[:, 0])
        return np.array(drawn)

    check_poisson(one, 0.3)


def test_batches_are_poisson_draws(tmp_path, monkeypatch):
    draws_of(tmp_path, monkeypatch, poisson_draw)


def test_shuffled_batches_are_noticed(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    shuffled = (np.sort(part) for _ in range(400) for part in np.split(random.permutation(40)[:36], 3))
    dealt: dict[bytes, np.ndarray] = {}  # a step has one draw, however often it is asked for
    with pytest.raises(AssertionError):
        draws_of(tmp_path, monkeypatch, lambda key, *_: dealt.setdefault(key, next(shuffled)))


def test_an_empty_draw_is_a_step_of_noise(tmp_path):
    def nobody(key: bytes, users: int, rate: float) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    private = begin(tmp_path / "run", make_curator=partial(Curator, draw=nobody))
    before = weights(private.model)
    assert list(private) == []
    assert private.steps_made == 3
    assert (weights(private.model) != before).all()


# --- the rest -----------------------------------------------------------------------------------------------------------


def test_micro_batches_and_workers_change_nothing(tmp_path):
    ends = []
    for n, options in enumerate(({"micro_batch": 4}, {"micro_batch": 60}, {"num_workers": 1})):
        private = begin(tmp_path / f"{n}", make_curator=EXACT, batch_size=30, **options)
        ends.append((train(private), weights(private.model)))
    assert ends[0][0] == ends[1][0] == ends[2][0]  # the same seed draws the same people
    for _, end in ends[1:]:
        torch.testing.assert_close(end, ends[0][1], atol=1e-6, rtol=0)


def test_a_declared_population_gives_rate_and_delta(tmp_path):
    private = begin(tmp_path / "run", population=100, batch_size=30, delta=5e-3)
    train(private)
    assert private.plan.users == 100
    assert "a declared population of 100 users" in private.statement.text()
    with pytest.raises(PrivacyError, match="population 50 is below"):
        begin(tmp_path / "other", population=50)


def test_without_privacy_it_trains_without_noise_and_says_so(tmp_path):
    model = small_model()
    private = begin(tmp_path / "run", model, epsilon=math.inf, steps=40, rate=0.01, max_norm=None)
    before = losses(model, (None, Rows().rows)).mean()
    train(private)
    assert losses(model, (None, Rows().rows)).mean() < 0.2 * before
    assert "NOT PRIVATE" in private.statement.text()


def test_it_learns_and_reports_how_far_the_weights_moved(tmp_path):
    model = small_model()
    start = weights(model)
    private = begin(tmp_path / "run", model, epsilon=500.0, steps=60, rate=0.05, max_norm=5.0)
    before = losses(model, (None, Rows().rows)).mean()
    train(private)
    assert losses(model, (None, Rows().rows)).mean() < 0.5 * before
    assert private.movement.distance == pytest.approx(float((weights(model) - start).norm()), rel=1e-5)
    assert "% of their norm" in private.movement.text()
    assert private.movement.still == ()


def test_weights_that_did_not_move_are_reported(tmp_path):
    private = begin(tmp_path / "run", rate=0.0)
    with pytest.warns(UserWarning, match=r"not moved at all: 0.weight, .*learning rate 0"):
        train(private)
    assert private.movement.distance == 0


def test_public_steps_are_said_and_not_charged(tmp_path):
    private = begin(tmp_path / "run")
    public = (None, torch.randn(4, WIDTH))
    for batch in private:
        done = private.step(lambda batch=batch: losses(private.model, batch))
        if not done:
            with pytest.raises(PrivacyError, match="not finished"):
                private.public_step(lambda: losses(private.model, public).mean())
        elif private.steps_made < 3:
            private.public_step(lambda: losses(private.model, public).mean())
    assert private.statement.steps.charged == 3
    assert "the data of 2 steps declared public" in private.statement.text()


def test_schedulers_and_averages_follow_the_steps(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3)
    average = torch.optim.swa_utils.AveragedModel(model)
    seen = []
    private = begin(tmp_path / "run", model, optimizer=optimizer, scheduler=scheduler, average=average)
    for batch in private:
        if private.step(lambda batch=batch: losses(model, batch)):
            seen.append(weights(model))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    torch.testing.assert_close(weights(average.module), torch.stack(seen).mean(0))
    again = torch.optim.swa_utils.AveragedModel(small_model(3))
    begin(tmp_path / "run", small_model(4), average=again)
    torch.testing.assert_close(weights(again.module), weights(average.module))


def test_the_released_folder_has_no_secret_and_no_data(tmp_path):
    private = begin(tmp_path / "run")
    assert (tmp_path / "run" / "private").stat().st_mode & 0o077 == 0
    train(private)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names - {"run.lock", "ledger.lock"} == {
        *("training.json", "ledger.jsonl", "ledger.head", "model.safetensors", "privacy.json")
    }


def test_the_signature_has_few_settings():
    import inspect

    assert len(inspect.signature(PrivateTraining).parameters) < 25
    assert no_noise(b"", (2,), 1.0).tolist() == [0, 0]


def test_an_account_of_people_is_charged_before_anything_is_asked(tmp_path):
    account = PeopleAccount.create(tmp_path / "account", Cap(epsilon=10.0, delta=1e-2))
    private = begin(tmp_path / "a", account=account.folder)
    assert [run.name for run in account.read().runs] == ["a"]
    private.close()
    with pytest.raises(PrivacyError, match="account"):
        begin(tmp_path / "a")
    private = begin(tmp_path / "a", account=account.folder)
    train(private)
    assert private.statement.account is not None
    assert len(account.read().runs) == 1
    with pytest.raises(PrivacyError, match="10"):
        begin(tmp_path / "b", account=account.folder)
    with pytest.raises(PrivacyError, match="epsilon inf"):
        begin(tmp_path / "c", account=account.folder, epsilon=math.inf)


def test_a_parameter_that_no_batch_uses_is_refused_before_it_is_paid_for(tmp_path):
    model = small_model()
    model.append(nn.Linear(1, 1))
    private = begin(tmp_path / "run", model)

    def loop():
        for batch in private:
            private.step(lambda batch=batch: model[2](model[1](model[0](batch[1])))[:, 0])

    with pytest.raises(ClippingError, match=r"'3.weight' \(and 1 more\)"):
        loop()
    assert read_ledger(private.run).steps_charged == 0
