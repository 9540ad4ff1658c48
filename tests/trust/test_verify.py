"""`verify` is green for every model, and each planted defect turns exactly its check red."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpformer.clipping import forms, gradient, stream
from dpformer.clipping.clip import Clip
from dpformer.data import batches
from dpformer.models.statistics import release
from dpformer.privacy import noise as noise_module
from dpformer.privacy.chain import CHAIN, HEAD
from dpformer.training import trainer as trainer_module
from dpformer.training.files import sha256
from dpformer.training.recipe import Recipe, make_recipe
from dpformer.training.session import begin
from dpformer.trust.verify import run as verify_run_module
from dpformer.trust.verify import verify_module, verify_run
from dpformer.trust.verify.built_in import BUILT_IN, embedded, make
from dpformer.trust.verify.checks import Found
from dpformer.trust.verify.papers import gaussian_delta, gaussian_epsilon
from tests.training.conftest import quick_accounting  # noqa: F401  (the same plans are asked for again and again)

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


# --- planted defects --------------------------------------------------------------------------------------------------


def half_the_noise(patch):
    plain = noise_module.GeneratorNoise.normal
    patch.setattr(noise_module.GeneratorNoise, "normal", lambda self, count: plain(self, count) / 2)


def no_cross_term(patch):
    """The products of a table's input side with its output side are forgotten, as hook-based libraries do."""
    plain = forms.inner

    def inner(a, b):
        return plain(a, b) * 0 if type(a) is not type(b) else plain(a, b)

    for module in (gradient, stream):
        patch.setattr(module, "inner", inner)
    # A gradient that is formed has no products to forget.
    patch.setattr(gradient.ParameterGradient, "_cheaper_route", lambda self: "gram")


def a_dropped_user(patch):
    plain = batches.cut
    patch.setattr(batches, "cut", lambda *a: [part[:-1] if len(part) > 1 else part for part in plain(*a)])


def division_by_the_realised_batch(patch):
    plain = trainer_module.Trainer.make_step

    def make_step(self):
        n = {}
        draw = self.sampler.draw

        def drawn():
            users = draw()
            n["users"] = max(1, len(users))
            return users

        self.sampler.draw = drawn
        update = self._update

        def by_realised(step):
            for p in self.model.parameters():
                p.grad.mul_(self.plan.batch_size / n["users"])
            update(step)

        self._update = by_realised
        try:
            return plain(self)
        finally:
            del self._update, self.sampler.draw

    patch.setattr(trainer_module.Trainer, "make_step", make_step)


def a_frozen_parameter(patch):
    plain = Recipe.build

    def build(self, items):
        model = plain(self, items)
        model.recurrent.bias_ih.requires_grad_(False)
        return model

    patch.setattr(Recipe, "build", build)


def an_unused_parameter(patch):
    plain = Recipe.build

    def build(self, items):
        model = plain(self, items)
        model.recurrent.spare = nn.Parameter(torch.zeros(3))
        load = model.load_state_dict
        model.load_state_dict = lambda state, **options: load({"recurrent.spare": torch.zeros(3), **state})
        return model

    patch.setattr(Recipe, "build", build)


def a_parameter_that_never_moves(patch):
    plain = trainer_module.Trainer._update

    def update(self, step):
        kept = self.model.recurrent.bias_hh.detach().clone()
        plain(self, step)
        with torch.no_grad():
            self.model.recurrent.bias_hh.copy_(kept)

    patch.setattr(trainer_module.Trainer, "_update", update)


def a_nonfinite_sample_that_leaks(patch):
    """A batch with a spoiled sample is left out altogether: that somebody in it was spoiled shows in the sum."""
    plain = Clip.factors

    def factors(self, squared, bound, eps):
        found = plain(self, squared, bound, eps)
        return found if bool(squared.isfinite().all()) else found * 0

    patch.setattr(Clip, "factors", factors)


def resume_that_redraws_noise(patch):
    patch.setattr(noise_module.GeneratorNoise, "restore", lambda self, state: self.__init__(977))


def noise_twice_the_same(patch):
    """The generator goes on, and what it gives is always the same."""
    plain = noise_module.GeneratorNoise.normal

    def normal(self, count):
        plain(self, count)
        return np.random.default_rng(1).standard_normal(count, np.float32)

    patch.setattr(noise_module.GeneratorNoise, "normal", normal)


DEFECTS = {
    half_the_noise: {"noise scale", "histogram release"},
    no_cross_term: {"norms"},
    a_dropped_user: {"every user once"},
    division_by_the_realised_batch: {"expected-batch division"},
    a_frozen_parameter: {"parameters recorded"},
    a_parameter_that_never_moves: {"parameters moving"},
    a_nonfinite_sample_that_leaks: {"non-finite sample"},
    resume_that_redraws_noise: {"resume equality"},
    noise_twice_the_same: {"noise scale", "histogram release"},
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_turns_exactly_its_check_red(runs, defect, monkeypatch):
    defect(monkeypatch)
    if defect is not resume_that_redraws_noise:
        monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Found(True, "left out, to be quick"))
    failed = set(verify_run(runs[NETWORK]).failed)
    if defect is no_cross_term:
        # The bound too, if the two sides of some sample point the same way: that depends on the weights.
        failed -= {"contribution bound"}
    assert failed == DEFECTS[defect]


def test_an_unused_parameter_is_refused_and_nothing_else_is_claimed(runs, monkeypatch):
    an_unused_parameter(monkeypatch)
    found = verify_run(runs[NETWORK])
    assert {"parameters recorded"} <= set(found.failed) <= {"parameters recorded", "resume equality"}
    assert statuses(found)["norms"] == "not checked"


def test_a_network_without_steps_is_held_to_its_releases(runs, monkeypatch, tmp_path):
    begin(tmp_path / "run", runs["gru"].parent / "data", make_recipe("distilled", distil=2, d=8)).train()
    found = verify_run(tmp_path / "run")
    assert set(statuses(found).values()) == {"pass"}, found.failed
    half_the_noise(monkeypatch)
    assert verify_run(tmp_path / "run").failed == ["noise scale"]


def test_defects_of_statistics(runs, monkeypatch):
    with monkeypatch.context() as patch:
        half_the_noise(patch)
        assert verify_run(runs["transitions"]).failed == ["noise scale"]
    with monkeypatch.context() as patch:
        patch.setattr(release, "SCALE", 1.01)
        assert verify_run(runs["transitions"]).failed == ["contribution bound"]
    with monkeypatch.context() as patch:
        resume_that_redraws_noise(patch)
        assert verify_run(runs["popularity"]).failed == ["resume equality"]


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
        monkeypatch.setattr(verify_run_module, "_check_network", lambda *a: None)
        monkeypatch.setattr(verify_run_module, "check_resume", lambda *a: Found(True, "left out, to be quick"))
    run = copied(runs[model], tmp_path / "run")
    tamper(run)
    hashes_that_fit(run)
    assert set(verify_run(run).failed) == TAMPERED[tamper]


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
