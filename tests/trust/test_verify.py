"""`verify` is green for every model, defects of the clipping turn their checks red, and so do tampered papers."""

import copy
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from dpformer import load_model
from dpformer.clipping import PhantomClipping, gradient
from dpformer.clipping import algebra as forms
from dpformer.clipping import tied as stream
from dpformer.clipping.clip import Clip
from dpformer.data import Sequences, batches, load, prepare, save
from dpformer.files import sha256
from dpformer.fit.folder import read_recipe
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.run import start
from dpformer.fit.workers import Team, Worker
from dpformer.models import GRU, RecurrentSpec, Transformer, TransformerSpec
from dpformer.privacy import Keys, selection
from dpformer.privacy.chain import CHAIN, HEAD
from dpformer.privacy.ledger import Ledger
from dpformer.training import clipped_sum
from dpformer.training.groups import Groups
from dpformer.trust.verify import verify_module, verify_run
from dpformer.trust.verify.answers import check_resume
from dpformer.trust.verify.checks import NotChecked, Verification
from dpformer.trust.verify.clipping import Subject, check_clipping
from dpformer.trust.verify.ledger import gaussian_delta, gaussian_epsilon, ledger_against_statement
from dpformer.trust.verify.network import check_network, float32_slack
from dpformer.trust.verify.noise import items_chosen, largest_mean_product, noise_outcome, ratio_interval
from dpformer.trust.verify.people import a_few, emptied
from dpformer.trust.verify.run import BUILT_IN, _data_part, check_files, embedded, make
from tests.fit.conftest import small_log
from tests.recipes import plain_recipe, small_recipe

NETWORK = "gru"  # the quickest with a tied table


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("verify")
    for model in BUILT_IN:
        make(model, place / model)
    embedded(place / "data")
    return {model: place / model for model in BUILT_IN}


def statuses(found) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


@pytest.mark.parametrize("model", BUILT_IN)
def test_every_built_in_model_is_green(runs, model):
    found = verify_run(runs[model])
    assert found.passed, [check for check in found.checks if check.status == "fail"]
    assert set(statuses(found).values()) == {"pass"}
    assert {"this run: model from answers", "model from answers", "resume equality"} <= statuses(found).keys()
    assert sum(check.false_alarm for check in found.checks) <= 1e-6


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def test_a_released_folder_alone_is_verified_and_says_what_is_not_checked(runs, tmp_path):
    alone = copied(runs["popularity"], tmp_path / "alone")
    (alone / "local.json").unlink()
    shutil.rmtree(alone / "answers")
    found = verify_run(alone)
    assert found.passed
    unclear = {name for name, status in statuses(found).items() if status == "not checked"}
    own = {name for name in statuses(found) if name.startswith("this run")}
    assert unclear == {"users", "data against statement", *own}
    assert "does not record where its data is" in next(c.detail for c in found.checks if c.name == "users")


def test_a_run_without_privacy_is_not_held_to_what_it_does_not_claim(runs, tmp_path):
    recipe = plain_recipe(model=NETWORK, epsilon=float("inf"), epochs=2.0, d=8, max_length=6)
    start(tmp_path / "run", runs[NETWORK].parent / "data", recipe).train()
    found = verify_run(tmp_path / "run")
    assert found.passed, found.failed
    unclear = {name for name, status in statuses(found).items() if status == "not checked"}
    own = {name for name in statuses(found) if name.startswith("this run")}
    assert unclear == {"float32 slack", "ledger against statement", "recount of epsilon", *own}


def test_a_private_catalogue_and_a_population_are_verified(tmp_path, monkeypatch):
    log = small_log(users=300, items=6).drop("title")
    save(prepare(log, catalogue="private"), tmp_path / "data")
    recipe = small_recipe("popularity", population=1000, delta=1e-4)
    start(tmp_path / "run", tmp_path / "data", recipe).train()
    found = verify_run(tmp_path / "run")
    # Six numbers are too few to see their noise; every other check is made.
    assert {n for n, s in statuses(found).items() if s != "pass"} <= {"this run: statistics"}, found.failed
    assert "a population of 1,000 was declared" in next(c.detail for c in found.checks if c.name == "users")
    monkeypatch.setattr(selection, "threshold", lambda noise_std, delta, most: 0.0)
    assert not items_chosen(recipe).good


# --- planted defects of the clipping; those of answers are in test_planted.py -----------------------------------------


def no_cross_term(patch):
    """The products of a table's input side with its output side are forgotten, as hook-based libraries do."""
    plain = forms.inner

    def inner(a, b):
        return plain(a, b) * 0 if type(a) is not type(b) else plain(a, b)

    for module in (gradient, stream):
        patch.setattr(module, "inner", inner)
    # A gradient that is formed has no products to forget.
    patch.setattr(gradient, "cheaper_route", lambda parameter, forms: "gram")


def a_dropped_user(patch):
    plain = batches.cut
    patch.setattr(batches, "cut", lambda users, widths, *budgets: plain(users[1:], widths[1:], *budgets))


def a_frozen_parameter(patch):
    changed_network(patch, lambda model: model.recurrent.bias_ih.requires_grad_(False))


def an_unused_parameter(patch):
    changed_network(patch, lambda model: model.recurrent.register_parameter("spare", nn.Parameter(torch.zeros(3))))


def changed_network(patch, change):
    """Change the released network."""
    plain = GRU.trained_network

    def trained_network(self):
        network = plain(self)
        change(network)
        return network

    patch.setattr(GRU, "trained_network", trained_network)


def a_nonfinite_sample_that_leaks(patch):
    """A batch with a spoiled sample is left out altogether: that somebody in it was spoiled shows in the sum."""
    plain = Clip.factors

    def factors(self, squared, bound, eps):
        found = plain(self, squared, bound, eps)
        return found if bool(squared.isfinite().all()) else found * 0

    patch.setattr(Clip, "factors", factors)


DEFECTS = {
    no_cross_term: {"norms"},
    a_dropped_user: {"float32 slack"},
    a_frozen_parameter: {"parameters recorded"},
    an_unused_parameter: {"parameters recorded"},
    a_nonfinite_sample_that_leaks: {"non-finite sample", "float32 slack"},
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_turns_exactly_its_check_red(runs, defect, monkeypatch):
    defect(monkeypatch)
    run = runs[NETWORK]
    verification, recipe, dataset = Verification("planted"), read_recipe(run), load(run.parent / "data")
    check_network(verification, load_model(run), recipe, a_few(dataset, 13), dataset)
    # The bound too, if the two sides of some sample point the same way: that depends on the weights.
    assert set(verification.failed) - {"contribution bound"} == DEFECTS[defect]
    if defect is an_unused_parameter:
        assert statuses(verification)["norms"] == "not checked"


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_factor_of_a_parameter_that_the_clipping_forgets_is_seen(forgotten, monkeypatch):
    module, x = nn.Linear(3, 1), torch.randn(6, 3)
    subject = Subject(module, lambda m, x: m(x)[:, 0].square(), (x,), scales={"weight": 0.5, "bias": 2.0})
    if forgotten:
        plain = PhantomClipping._gradients
        monkeypatch.setattr(PhantomClipping, "_gradients", lambda *of: [(g, 1.0) for g, _ in plain(*of)])
    verification = Verification("factors")
    check_clipping(verification, subject, may_freeze=False)
    assert set(verification.failed) - {"contribution bound"} == ({"norms", "sums"} if forgotten else set())


def redraw(patch):
    """New keys, and a ledger that takes them."""
    plain = Keys.restored.__func__
    patch.setattr(Keys, "restored", classmethod(lambda cls, state: plain(cls, state | {"secret": "77" * 32})))
    any_replay_is_taken(patch)


def any_replay_is_taken(patch):
    """A replay is not compared with what was charged."""
    plain = Ledger.charge

    def charge(self, place, name, tag):
        return False if place < len(self._entries) else plain(self, place, name, tag)

    patch.setattr(Ledger, "charge", charge)


@pytest.mark.parametrize("defect", [redraw, any_replay_is_taken])
@pytest.mark.parametrize(
    "recipe", [small_recipe(delta=1e-4), small_recipe("popularity", delta=1e-4)], ids=["steps", "one"]
)
def test_a_resumed_run_that_is_another_one(runs, defect, recipe, tmp_path, monkeypatch):
    from dpformer.privacy import Curator

    data, make_curator = runs[NETWORK].parent / "data", Curator
    start(tmp_path / "whole", data, recipe).train()
    assert check_resume(tmp_path / "whole", tmp_path / "sound", data, recipe, make_curator).good
    defect(monkeypatch)
    assert not check_resume(tmp_path / "whole", tmp_path / "planted", data, recipe, make_curator).good


# --- the tests of noise -----------------------------------------------------------------------------------------------


def test_sound_noise_passes_and_its_false_alarms_are_as_stated():
    """400 sound draws: a false alarm in one of them has probability below 400 x 3e-7. A drawn value of exactly 0 is none."""
    random = np.random.default_rng(0)
    for _ in range(400):
        drawn = {f"a {k}": random.normal(size=300) for k in range(4)}
        drawn["a 0"][0] = 0.0
        assert noise_outcome(drawn).good
    # At 1e-2 in place of 3e-7, 20,000 times: the chi-square test is exact, Chernoff's bound is not met.
    x, y = random.normal(size=(2, 20_000, 50))
    low, high = ratio_interval(50, 1e-2)
    rms = np.sqrt((x**2).mean(1))
    assert 150 < ((rms < low) | (rms > high)).sum() < 250  # 200 expected, sd 14
    assert 0 < (np.abs((x * y).mean(1)) > largest_mean_product(50, 1e-2)).sum() < 200


def test_noise_of_another_size_mean_or_direction_fails():
    random = np.random.default_rng(1)
    for scale in (0.7, 0.9, 1.1):
        assert not noise_outcome({k: scale * random.normal(size=2000) for k in "abcd"}).good
    one = {"a": random.normal(size=80), "b": random.normal(size=5000)}
    assert "wrong: a" in noise_outcome(one | {"a": 0.2 * one["a"]}).detail
    assert "repeat" in noise_outcome(one | {"c": one["a"]}).detail
    assert "mean" in noise_outcome(one | {"b": one["b"] + 0.2}).detail
    assert not noise_outcome(one, along={"sum": 9.0}).good
    assert not noise_outcome({"b": 0.7 * one["b"]}, signal=True).good
    assert noise_outcome({"b": 1.1 * one["b"]}, signal=True).good


def test_a_test_without_power_is_not_a_pass():
    random = np.random.default_rng(2)
    for few, signal in (
        ({"a": random.normal(size=20)}, False),
        ({"a": 3 * random.normal(size=5000)}, True),
        ({}, False),
    ):
        with pytest.raises(NotChecked):
            noise_outcome(few, signal=signal)


# --- float32 ----------------------------------------------------------------------------------------------------------

USERS, ITEMS = 30, 40


def some_people(lengths, seed: int = 0) -> Sequences:
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = random.integers(1, ITEMS + 1, offsets[-1]).astype(np.int32)
    return Sequences(pl.Series("user_id", [str(k) for k in range(len(lengths))]), items, offsets)


PEOPLE = some_people(np.random.default_rng(0).integers(1, 15, USERS))


def query(model, worker=Worker) -> GradientSum:
    model.train()
    made = worker(model, PhantomClipping(model))
    return GradientSum(Team(made, 1), Groups(100, 100), max_length=12, token_budget=60)


def moved(asked: GradientSum, people=PEOPLE):
    return float32_slack(asked, people, np.arange(len(people)), "people")


def test_a_person_without_events_keeps_the_place():
    rest = emptied(PEOPLE, [3])
    assert len(rest) == len(PEOPLE)
    assert rest.lengths[3] == 0
    assert all(np.array_equal(rest[k], PEOPLE[k]) for k in range(len(PEOPLE)) if k != 3)


def test_float32_uses_little_of_its_room():
    torch.manual_seed(0)
    seen = moved(query(GRU(RecurrentSpec(kind="gru", items=ITEMS, d=8))))
    assert seen.good
    assert seen.figures["people"] == 8
    assert 0 < seen.figures["moved"] < 1e-5


class Coarse(Worker):
    """Adds up in 16 bits."""

    def add(self, batch, masks=None):
        loss = super().add(batch, masks)
        for p in self.model.parameters():
            p.grad.copy_(p.grad.bfloat16())
        return loss


def test_sums_in_16_bits_are_seen():
    torch.manual_seed(0)
    seen = moved(query(GRU(RecurrentSpec(kind="gru", items=ITEMS, d=8)), Coarse))
    assert not seen.good
    assert seen.figures["moved"] > 1e-3


@pytest.mark.parametrize(
    "model",
    [
        lambda: Transformer(TransformerSpec(items=ITEMS, max_length=49, d=16)),
        lambda: GRU(RecurrentSpec(kind="gru", items=ITEMS, d=16)),
    ],
)
@pytest.mark.parametrize("rule", ["automatic", "flat"])
def test_the_longest_of_many_leaves(model, rule):
    """All others lose their padding at once. 80 people of 2 items and one of 50, which are in one micro-batch."""
    people = some_people([2] * 80 + [50])
    torch.manual_seed(0)
    network = model().train()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn_like(p) * 0.3)  # large gradients that partly cancel, as after some noise
    team = Team(Worker(network, PhantomClipping(network, 1.0, rule)), 1)
    seen = moved(GradientSum(team, Groups(81, 81), 49, 16384), people)
    assert seen.good, seen.detail
    assert seen.figures["moved"] < 5e-6  # was 4e-4 when padding was part of the bound on rounding


def test_dropout_is_a_matter_of_each_person_alone(monkeypatch):
    """With masks by the cipher a person's leaving moves nobody else; with torch's own generator it moves everybody."""
    torch.manual_seed(0)
    model = Transformer(TransformerSpec(items=ITEMS, max_length=12, d=8, dropout=0.3))
    assert moved(query(copy.deepcopy(model))).good
    monkeypatch.setattr(clipped_sum, "is_random", lambda module: False)
    assert not moved(query(model)).good


# --- tampered papers --------------------------------------------------------------------------------------------------


def shorter_ledger(run: Path) -> None:
    lines = (run / CHAIN).read_bytes().splitlines(keepends=True)[:-1]
    (run / CHAIN).write_bytes(b"".join(lines))
    last = json.loads(lines[-1])
    (run / HEAD).write_text(json.dumps({"entries": last.get("n", 0), "hash": last["hash"]}))


def smaller_epsilon(run: Path) -> None:
    stated = json.loads((run / "privacy.json").read_text())
    stated["epsilon"] *= 0.99
    (run / "privacy.json").write_text(json.dumps(stated))


def smaller_epsilon_at_one_over_users(run: Path) -> None:
    stated = json.loads((run / "privacy.json").read_text())
    stated["epsilon_at_delta_1_over_users"] *= 0.99
    (run / "privacy.json").write_text(json.dumps(stated))


def restated(run: Path, *names: str, value) -> None:
    stated = json.loads((run / "privacy.json").read_text())
    part = stated
    for name in names[:-1]:
        part = part[name]
    part[names[-1]] = value
    (run / "privacy.json").write_text(json.dumps(stated))


def other_neighbours(run: Path) -> None:
    restated(run, "neighbours", value="one user is added or removed")


def a_finer_grid(run: Path) -> None:
    restated(run, "noise", "grid", value="none")


def a_silent_assumption(run: Path) -> None:
    restated(run, "assumptions", value=["none" for _ in json.loads((run / "privacy.json").read_text())["assumptions"]])


def a_public_catalogue(run: Path) -> None:
    restated(run, "data", "catalogue", value="public")


def hashes_that_fit(run: Path) -> None:
    """Against damage there are hashes; whoever tampers with the papers makes them fit."""
    known = json.loads((run / "files.json").read_text())
    (run / "files.json").write_text(json.dumps(known | {"privacy.json": sha256(run / "privacy.json")}))


def a_pickle(run: Path) -> None:
    (run / "notes.txt").write_bytes(pickle.dumps({"a": 1}, protocol=0))


def a_torch_file(run: Path) -> None:
    torch.save({"a": torch.zeros(2)}, run / "extra.bin")


def objects_in_numpy(run: Path) -> None:
    np.save(run / "extra.npy", np.array([{}, 1], dtype=object))


TAMPERED = {
    shorter_ledger: {"ledger against statement"},
    other_neighbours: {"fields", "ledger against statement"},
    a_finer_grid: {"fields", "ledger against statement"},
    smaller_epsilon: {"fields", "recount of epsilon"},
    smaller_epsilon_at_one_over_users: {"fields", "recount of epsilon"},
    a_pickle: {"no pickle", "fields"},
    a_torch_file: {"no pickle", "fields"},
    objects_in_numpy: {"no pickle", "fields"},
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("model", ["popularity", "gru"])
def test_tampered_papers_turn_exactly_their_check_red(runs, tamper, model, tmp_path):
    run = copied(runs[model], tmp_path / "run")
    tamper(run)
    hashes_that_fit(run)
    verification = Verification("tampered")
    check_files(verification, run, load_model(run), read_recipe(run))
    # The card is made of the statement, so a change of one sentence shows there too, where the card has it.
    assert set(verification.failed) | {"fields"} == TAMPERED[tamper] | {"fields"}


def test_a_catalogue_of_the_log_that_is_stated_as_public(runs, tmp_path):
    run = copied(runs["popularity"], tmp_path / "run")
    a_public_catalogue(run)
    hashes_that_fit(run)
    assert not _data_part(load_model(run), load(runs["gru"].parent / "data")).good


def test_the_assumption_of_float32_is_stated_where_there_are_steps(runs, tmp_path):
    statement = load_model(runs[NETWORK]).statement
    assert ledger_against_statement(runs[NETWORK], statement, read_recipe(runs[NETWORK])).good
    run = copied(runs[NETWORK], tmp_path / "run")
    a_silent_assumption(run)
    hashes_that_fit(run)
    changed = load_model(run)
    outcome = ledger_against_statement(run, changed.statement, read_recipe(run))
    assert not outcome.good
    assert "assumptions" in outcome.detail
    assert load_model(runs["popularity"]).statement.assumptions == ()


def test_the_command_prints_a_table_and_exits_with_1_on_a_failure(runs, dpformer, tmp_path):
    good = dpformer("verify", runs["popularity"], "--json")
    assert good.code == 0
    assert json.loads(good.out)["passed"]
    run = copied(runs["popularity"], tmp_path / "run")
    a_pickle(run)
    bad = dpformer("verify", run)
    assert bad.code == 1
    assert "no pickle" in bad.out
    assert "notes.txt" in bad.out
    assert dpformer("verify", run, "--module", "x:y").code == 2


# --- a module of one's own --------------------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn
from torch.nn import functional as F

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.mix = nn.Linear(6, 6)
    def forward(self, s):
        return torch.tanh(self.mix(self.embedding(s))) @ self.embedding.weight.T

def losses(module, s):
    return F.cross_entropy(module(s[:, :-1]).transpose(1, 2), s[:, 1:], reduction="none").mean(1)

def coupled(module, s):
    each = F.cross_entropy(module(s[:, :-1]).transpose(1, 2), s[:, 1:], reduction="none").sum(1)
    return each / (s[:, 1:] > 3).sum()

def factory():
    torch.manual_seed(0)
    return Tied(), losses, torch.randint(20, (6, 5))

def divides_by_the_batch():
    torch.manual_seed(0)
    return Tied(), coupled, (torch.randint(20, (6, 5)),)

def wrong():
    return Tied()
"""


def test_a_module_of_ones_own(dpformer, tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    good = dpformer("verify", "--module", "my_model:factory", "--json")
    assert good.code == 0, good.out + good.err
    checks = {c["name"]: c["status"] for c in json.loads(good.out)["subjects"][0]["checks"]}
    assert [n for n, s in checks.items() if s == "pass"] == [
        *("parameters recorded", "losses alone", "norms", "sums", "contribution bound", "non-finite sample"),
        "empty batch",
    ]
    # What no gradient shows and the guard cannot see: a division by the batch's count of tokens.
    coupled = verify_module("my_model:divides_by_the_batch")
    assert "losses alone" in coupled.failed
    with monkeypatch.context() as patch:
        no_cross_term(patch)
        assert set(verify_module("my_model:factory").failed) == {"norms", "contribution bound"}
    assert dpformer("verify", "--module", "my_model:wrong").code == 2
    assert dpformer("verify", "--module", "my_model:nowhere").code == 2
    assert dpformer("verify", "--module", "my_model").code == 2


def test_the_closed_form_inverts():
    for mu, delta in [(0.3, 1e-5), (1.7, 1e-5), (6.0, 1e-3)]:
        assert gaussian_delta(mu, gaussian_epsilon(mu, delta)) == pytest.approx(delta, rel=1e-6)
    assert gaussian_epsilon(1e-9, 1e-3) == 0
