"""`verify` is green for every model, and each planted defect turns exactly its check red."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpformer import load_model
from dpformer.clipping import algebra as forms
from dpformer.clipping import gradient
from dpformer.clipping import tied as stream
from dpformer.clipping.clip import Clip
from dpformer.data import batches, prepare, save
from dpformer.files import sha256
from dpformer.fit import dpsgd as trainer_module
from dpformer.fit import stage as stage_module
from dpformer.fit.folder import read_recipe
from dpformer.fit.run import start
from dpformer.privacy import Curator, Keys, query, selection
from dpformer.privacy.chain import CHAIN, HEAD
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.noise import rounded_gaussian
from dpformer.statistics import histogram, transitions
from dpformer.trust.verify import run as verify_run_module
from dpformer.trust.verify import verify_module, verify_run
from dpformer.trust.verify.built_in import BUILT_IN, embedded, make
from dpformer.trust.verify.checks import Outcome
from dpformer.trust.verify.folder import gaussian_delta, gaussian_epsilon, ledger_against_statement
from tests.fit.conftest import (
    quick_accounting,  # noqa: F401  (the same plans are asked for again and again)
    small_log,
)
from tests.recipes import plain_recipe, small_recipe

NETWORK = "gru"  # the quickest with a tied table


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("verify")
    data = embedded(place / "data")
    for model in BUILT_IN:
        make(model, place / model, data)
    return {model: place / model for model in BUILT_IN}


def statuses(found) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


@pytest.mark.parametrize("model", BUILT_IN)
def test_every_built_in_model_is_green(runs, model):
    found = verify_run(runs[model])
    assert found.passed, [check for check in found.checks if check.status == "fail"]
    assert set(statuses(found).values()) == {"pass"}


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def test_a_released_folder_alone_is_verified_and_says_what_is_not_checked(runs, tmp_path):
    alone = copied(runs["popularity"], tmp_path / "alone")
    (alone / "local.json").unlink()
    found = verify_run(alone)
    assert found.passed
    assert statuses(found)["users"] == "not checked"
    assert "does not tell where its data is" in next(c.detail for c in found.checks if c.name == "users")


def test_a_released_network_alone_is_tried_on_invented_people(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Outcome(True, "left out, to be quick"))
    alone = copied(runs[NETWORK], tmp_path / "alone")
    (alone / "local.json").unlink()
    found = verify_run(alone)
    assert found.passed, found.failed
    assert "invented people" in next(c.detail for c in found.checks if c.name == "float32 slack")


def test_a_run_without_privacy_is_not_held_to_what_it_does_not_claim(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Outcome(True, "left out, to be quick"))
    recipe = plain_recipe(model=NETWORK, epsilon=float("inf"), epochs=2.0, d=8, max_length=6)
    start(tmp_path / "run", runs[NETWORK].parent / "data", recipe).train()
    found = verify_run(tmp_path / "run")
    assert found.passed, found.failed
    unclaimed = {"float32 slack", "ledger against statement", "recount of epsilon"}
    assert {name for name, status in statuses(found).items() if status == "not checked"} == unclaimed


def test_a_private_catalogue_and_a_population_are_verified(tmp_path, monkeypatch):
    log = small_log(users=300, items=6).drop("title")
    save(prepare(log, catalogue="private"), tmp_path / "data")
    start(tmp_path / "run", tmp_path / "data", small_recipe("popularity", population=1000, delta=1e-4)).train()
    found = verify_run(tmp_path / "run")
    assert set(statuses(found).values()) == {"pass"}, found.failed
    assert "a population of 1,000 was declared" in next(c.detail for c in found.checks if c.name == "users")
    monkeypatch.setattr(selection, "threshold", lambda noise_std, delta, most: 0.0)
    assert verify_run(tmp_path / "run").failed == ["items chosen"]


# --- planted defects --------------------------------------------------------------------------------------------------


def with_noise(patch, noise):
    """Every Curator that is made now has this noise."""
    patch.setitem(Curator.__init__.__kwdefaults__, "noise", noise)


def less_noise(patch):
    with_noise(patch, lambda key, shape, std: rounded_gaussian(key, shape, 0.7 * std))


def no_noise(patch):
    with_noise(patch, lambda key, shape, std: np.zeros(shape, dtype=np.int64))


def another_sampler(patch):
    """Batches of a fixed size."""
    random = np.random.default_rng(0)

    def draw(key, users, rate):
        return np.sort(random.permutation(users)[: round(users * rate)])

    patch.setitem(Curator.__init__.__kwdefaults__, "draw", draw)


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


def division_by_the_realised_batch(patch):
    plain = trainer_module.Trainer.gradients

    def gradients(self, answer):
        factor = self.plan.batch_size / max(1, self.query.report.users)
        return [factor * value for value in plain(self, answer)]

    patch.setattr(trainer_module.Trainer, "gradients", gradients)


def changed_network(patch, change):
    """Change the network that is trained, and the released one."""
    build, network = stage_module.build, verify_run_module._network
    patch.setattr(stage_module, "build", lambda spec: change(build(spec)))
    patch.setattr(verify_run_module, "_network", lambda model: change(network(model)))


def a_frozen_parameter(patch):
    def freeze(model):
        model.recurrent.bias_ih.requires_grad_(False)
        return model

    changed_network(patch, freeze)


def an_unused_parameter(patch):
    def add(model):
        model.recurrent.spare = nn.Parameter(torch.zeros(3))
        return model

    changed_network(patch, add)


def a_parameter_that_never_moves(patch):
    plain = trainer_module.Trainer.update

    def update(self, gradients):
        kept = self.model.recurrent.bias_hh.detach().clone()
        plain(self, gradients)
        with torch.no_grad():
            self.model.recurrent.bias_hh.copy_(kept)

    patch.setattr(trainer_module.Trainer, "update", update)


def a_nonfinite_sample_that_leaks(patch):
    """A batch with a spoiled sample is left out altogether: that somebody in it was spoiled shows in the sum."""
    plain = Clip.factors

    def factors(self, squared, bound, eps):
        found = plain(self, squared, bound, eps)
        return found if bool(squared.isfinite().all()) else found * 0

    patch.setattr(Clip, "factors", factors)


def resume_that_redraws_noise(patch):
    """New keys, and a ledger that takes them."""
    plain = Keys.restored.__func__

    def restored(cls, state):
        return plain(cls, state | {"secret": "77" * 32})

    patch.setattr(Keys, "restored", classmethod(restored))
    any_replay_is_taken(patch)


def any_replay_is_taken(patch):
    """A replay is not compared with what was charged."""
    plain = Ledger.charge

    def charge(self, place, name, tag):
        return False if place < len(self._entries) else plain(self, place, name, tag)

    patch.setattr(Ledger, "charge", charge)


def steps_charged_once(patch):
    """Of all answers with the same name the first is charged."""
    plain = Ledger.charge

    def charge(self, place, name, tag):
        return False if name in [entry.name for entry in self._entries] else plain(self, place, name, tag)

    patch.setattr(Ledger, "charge", charge)


def noise_twice_the_same(patch):
    """The keys go on, and the noise is always the same."""
    with_noise(patch, lambda key, shape, std: rounded_gaussian(bytes(32), shape, std))


RESUME = "resume equality"
DEFECTS = {
    less_noise: {"noise scale", "answer noise"},
    no_noise: {"noise scale", "answer noise", "empty batch"},
    noise_twice_the_same: {"noise scale", "answer noise"},
    another_sampler: {"sampler"},
    no_cross_term: {"norms"},
    a_dropped_user: {"every user once"},
    division_by_the_realised_batch: {"expected-batch division"},
    a_frozen_parameter: {"parameters recorded"},
    a_parameter_that_never_moves: {"parameters moving"},
    a_nonfinite_sample_that_leaks: {"non-finite sample"},
    resume_that_redraws_noise: {RESUME},
    any_replay_is_taken: {RESUME},
    steps_charged_once: {"steps charged", RESUME},
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_turns_exactly_its_check_red(runs, defect, monkeypatch):
    defect(monkeypatch)
    if RESUME not in DEFECTS[defect]:
        monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Outcome(True, "left out, to be quick"))
    failed = set(verify_run(runs[NETWORK]).failed)
    if defect is no_cross_term:
        # The bound too, if the two sides of some sample point the same way: that depends on the weights.
        failed -= {"contribution bound"}
    if defect is a_dropped_user:
        # Nearly always: who takes the place of somebody who leaves depends on who was drawn.
        failed -= {"float32 slack"}
    assert failed == DEFECTS[defect]


def test_an_unused_parameter_is_refused_and_nothing_else_is_claimed(runs, monkeypatch):
    an_unused_parameter(monkeypatch)
    found = verify_run(runs[NETWORK])
    assert {"parameters recorded"} <= set(found.failed) <= {"parameters recorded", "resume equality"}
    assert statuses(found)["norms"] == "not checked"


def test_presets_with_statistics_are_held_to_their_answers(runs, monkeypatch):
    less_noise(monkeypatch)
    monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Outcome(True, "left out, to be quick"))
    assert verify_run(runs["the default preset"]).failed == ["answer noise"]
    assert set(verify_run(runs["preset whole"]).failed) == {"answer noise", "noise scale"}


def test_defects_of_statistics(runs, monkeypatch):
    with monkeypatch.context() as patch:
        less_noise(patch)
        assert verify_run(runs["transitions"]).failed == ["answer noise"]
    with monkeypatch.context() as patch:
        any_replay_is_taken(patch)
        assert verify_run(runs["popularity"]).failed == [RESUME]


def test_vectors_of_norm_1_3(runs, monkeypatch):
    """The Curator's query refuses them; and where that check is missing, the sensitivity is measured."""
    for module in (histogram, transitions):
        monkeypatch.setattr(module, "SCALE", 1.3)
    found = verify_run(runs["transitions"])
    assert set(found.failed) == {"answers planned", RESUME}
    assert "norm 1.3, above its bound" in found.checks[0].detail

    def unchecked(name, vectors, people, cells, bound, grid):
        total = np.zeros(cells)
        for _, cell, value in vectors:
            total += np.bincount(cell, weights=np.trunc(value / grid), minlength=cells)
        return total.astype(np.int64)

    monkeypatch.setattr(query, "sum_on_grid", unchecked)
    found = verify_run(runs["transitions"])
    assert found.failed == ["answer sensitivity"]
    assert "histogram 1.300000 of 1" in found.checks[1].detail


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
    other_neighbours: {"ledger against statement"},
    a_finer_grid: {"ledger against statement"},
    a_public_catalogue: {"data against statement"},
    smaller_epsilon: {"recount of epsilon"},
    smaller_epsilon_at_one_over_users: {"recount of epsilon"},
    a_pickle: {"no pickle"},
    a_torch_file: {"no pickle"},
    objects_in_numpy: {"no pickle"},
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("model", ["popularity", "gru"])
def test_tampered_papers_turn_exactly_their_check_red(runs, tamper, model, tmp_path, monkeypatch):
    if model == "gru":  # the papers alone: the training is checked above
        monkeypatch.setattr(verify_run_module, "_check_small", lambda *a: None)
        monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Outcome(True, "left out, to be quick"))
    run = copied(runs[model], tmp_path / "run")
    tamper(run)
    hashes_that_fit(run)
    assert set(verify_run(run).failed) == TAMPERED[tamper]


def test_the_assumption_of_float32_is_stated_where_there_are_steps(runs, tmp_path):
    statement = load_model(runs[NETWORK]).statement
    assert ledger_against_statement(runs[NETWORK], statement, read_recipe(runs[NETWORK])).good
    run = copied(runs[NETWORK], tmp_path / "run")
    a_silent_assumption(run)
    hashes_that_fit(run)
    changed = load_model(run)
    assert "assumption of float32" in ledger_against_statement(run, changed.statement, read_recipe(run)).detail
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
        *("empty batch", "noise scale"),
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
