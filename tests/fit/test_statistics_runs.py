"""Statistics as runs: charged release by release, gone on with after a crash, used like any other model."""

import pytest
import torch
from safetensors.torch import load_file

from dpformer import DPFormer, load_model
from dpformer.data import demo_frame, prepare, save
from dpformer.errors import DPFormerError
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import read_ledger
from dpformer.privacy.noise import rounded_gaussian
from tests.fit.conftest import plant_curator


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers") / "data"
    save(prepare(demo_frame().filter(demo_frame()["user_id"] < "reader-0400")), folder)
    return folder


def recipe(**options):
    return make_recipe(**{"model": "transitions", "seed": 5, "delta": 1e-4, **options})


@pytest.mark.parametrize(("model", "releases"), [("transitions", 4), ("popularity", 1)])
def test_every_release_is_charged_and_the_model_loads(data, tmp_path, model, releases):
    run = start(tmp_path / "run", data, recipe(model=model))
    assert run.train()
    account = read_ledger(tmp_path / "run")
    assert len(account.entries) == releases
    assert account.released == {r.name for r in account.plan.releases}
    released = load_model(tmp_path / "run")
    assert released.statement.epsilon <= 8
    assert not (tmp_path / "run" / "private").exists()
    frame = released.recommend([["book-000"], []], k=3)
    assert frame.height == 6
    assert "book-000" not in frame.filter(frame["history"] == 0)["item_id"]


def test_a_crash_between_releases_costs_nothing_more(data, tmp_path):
    whole = start(tmp_path / "whole", data, recipe())
    whole.train()
    run = start(tmp_path / "run", data, recipe())
    drawn = []

    def dies(key, shape, std):
        drawn.append(std)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return rounded_gaussian(key, shape, std)

    plant_curator(run, noise=dies)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.close()
    assert len(read_ledger(tmp_path / "run").entries) == 3, "charged before the noise is drawn"
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = resume(tmp_path / "run")
    assert again.train()
    assert len(read_ledger(tmp_path / "run").entries) == 4
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    with pytest.raises(DPFormerError, match="finished"):
        resume(tmp_path / "run")


def test_refusals(data, tmp_path):
    with pytest.raises(DPFormerError, match="finite epsilon"):
        recipe(epsilon=float("inf"))
    start(tmp_path / "run", data, recipe(model="popularity")).train()
    with pytest.raises(DPFormerError, match="exists already"):
        start(tmp_path / "run", data, recipe())


def test_the_estimator_and_the_command_take_them_too(data, tmp_path, dpformer):
    model = DPFormer(model="transitions", epsilon=8, delta=1e-4).fit(demo_frame().head(8000))
    assert model.recommend(histories=[["book-000"]], k=2).height == 2
    assert 0 <= model.evaluate().masked["ndcg@10"].value <= 1
    done = dpformer("fit", data, "--run", tmp_path / "run", "--model", "popularity", "--set", "delta=1e-4")
    assert done.code == 0, done.err
    assert "1 releases, no steps" in done.err
    assert dpformer("evaluate", tmp_path / "run", data).code == 0
    assert "released popularity" in dpformer("recommend", tmp_path / "run", "--history", "nothing known").err
