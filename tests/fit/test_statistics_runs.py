"""Runs without steps: charged answer by answer, resumed after a crash or a stop, used like any other model."""

import os
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from dpformer import DPFormer, load_model
from dpformer.data import demo_frame, prepare, save
from dpformer.errors import DPFormerError
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import Curator, read_ledger
from dpformer.privacy.noise import rounded_gaussian
from tests.recipes import small_recipe

TRANSITIONS = ["histogram", "transitions 1", "transitions 2", "transitions 3"]


def assert_same_model(folder, whole):
    """The same tensors, to the last bit."""
    a, b = (load_file(place / "model.safetensors") for place in (folder, whole))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers") / "data"
    save(prepare(demo_frame().filter(demo_frame()["user_id"] < "reader-0400")), folder)
    return folder


def recipe(preset="transitions", **options):
    return make_recipe(preset, **{"seed": 5, "delta": 1e-4, **options})


@pytest.mark.parametrize(("preset", "releases"), [("transitions", 4), ("popularity", 1)])
def test_every_answer_is_charged_and_the_model_loads(data, tmp_path, preset, releases):
    run = start(tmp_path / "run", data, recipe(preset))
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


def test_a_crash_between_answers_costs_nothing_more(data, tmp_path):
    whole = start(tmp_path / "whole", data, recipe())
    whole.train()
    drawn = []

    def dies(key, shape, std):
        drawn.append(std)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return rounded_gaussian(key, shape, std)

    run = start(tmp_path / "run", data, recipe(), make_curator=partial(Curator, noise=dies))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.close()
    assert len(read_ledger(tmp_path / "run").entries) == 3, "charged before the noise is drawn"
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = resume(tmp_path / "run")
    assert again.train()
    assert len(read_ledger(tmp_path / "run").entries) == 4
    assert_same_model(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(DPFormerError, match="finished"):
        resume(tmp_path / "run")


def stages_of(run, stop_after=None):
    """Train; stop after a stage if it is given. Whether the model is released, and the stages that were seen."""
    seen = []

    def note(progress):
        if progress.done:  # not where a stage begins
            seen.append(progress.stage)

    done = run.train(note, lambda: seen[-1:] == [stop_after])
    run.close()
    return done, list(dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("stop_after", "charged"), [("histogram", ["histogram"]), ("transitions", TRANSITIONS), ("distil", TRANSITIONS)]
)
def test_a_stop_between_stages_is_resumed_to_the_same_bits(data, tmp_path, stop_after, charged):
    """Ctrl-C asks to stop: the run stops after the piece of work that it is doing, and what was charged is not paid again."""
    small = recipe("distilled", **{"d": 8, "distil.steps": 3})
    names = ["histogram", "transitions", "distil"]
    assert stages_of(start(tmp_path / "whole", data, small)) == (True, names)
    done, seen = stages_of(start(tmp_path / "run", data, small), stop_after)
    assert (done, seen) == (False, names[: names.index(stop_after) + 1])
    assert [entry.name for entry in read_ledger(tmp_path / "run").entries] == charged
    assert not (tmp_path / "run" / "model.safetensors").exists()
    torch.manual_seed(99)  # what else the process draws must not matter
    assert stages_of(resume(tmp_path / "run")) == (True, names)
    assert_same_model(tmp_path / "run", tmp_path / "whole")
    assert read_ledger(tmp_path / "run").entries == read_ledger(tmp_path / "whole").entries


def test_the_command_says_that_it_stopped_before_the_steps(data, tmp_path, dpformer, monkeypatch):
    """A real SIGINT while the histogram is asked for."""
    ask = Curator.ask

    def interrupted(self, query):
        os.kill(os.getpid(), signal.SIGINT)
        return ask(self, query)

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Curator, "ask", interrupted)
        done = dpformer("fit", data, "--run", folder, "--preset", "transitions", "--set", "delta=1e-4")
    assert done.code == 130
    assert "histogram 1/1" in done.err
    assert f"stopped and saved before the first step; go on with: dpformer resume {folder}" in done.err
    assert len(read_ledger(folder).entries) == 1
    assert dpformer("resume", folder, "--quiet").code == 0
    assert [entry.name for entry in read_ledger(folder).entries] == TRANSITIONS


def test_refusals(data, tmp_path):
    with pytest.raises(DPFormerError, match="steps alone"):
        recipe(epsilon=float("inf"))
    start(tmp_path / "run", data, recipe("popularity")).train()
    with pytest.raises(DPFormerError, match="exists already"):
        start(tmp_path / "run", data, recipe())


def test_the_estimator_and_the_command_take_them_too(data, tmp_path, dpformer):
    model = DPFormer("transitions", epsilon=8, delta=1e-4).fit(demo_frame().head(8000))
    assert model.recommend(histories=[["book-000"]], k=2).height == 2
    assert 0 <= model.evaluate().masked["ndcg@10"].value <= 1
    done = dpformer("fit", data, "--run", tmp_path / "run", "--preset", "popularity", "--set", "delta=1e-4")
    assert done.code == 0, done.err
    assert "1 releases, no steps" in done.err
    assert dpformer("evaluate", tmp_path / "run", "--data", data).code == 0
    assert "released popularity" in dpformer("recommend", tmp_path / "run", "--history", "nothing known").err


def test_a_distilled_network_alone_answers_empty_histories_by_popularity(tmp_path, data):
    recipe = small_recipe("distilled", **{"transitions.weight": 0.0, "distil.steps": 2, "d": 8})
    assert start(tmp_path / "run", data, recipe).train()
    model = load_model(tmp_path / "run")
    popularity = model.model.popularity()
    best, _ = model.rank([[]], k=3)
    assert best[0].tolist() == (popularity[1:].argsort(descending=True, stable=True)[:3] + 1).tolist()


def test_a_run_that_was_stopped_before_its_steps_is_resumed_and_not_trained_again(tmp_path, data):
    run = start(tmp_path / "run", data, small_recipe("transitions"))
    assert not run.train(should_stop=lambda: True)
    with pytest.raises(DPFormerError, match="dpformer resume"):
        run.train()
    run.close()
    assert resume(tmp_path / "run").train()


def test_a_histogram_of_noise_is_said_before_the_rest_is_asked(data, tmp_path):
    said = {}
    for epsilon, preset in [(0.1, "transitions"), (0.1, "popularity"), (8.0, "transitions")]:
        run, answers = start(tmp_path / f"{preset}-{epsilon}", data, recipe(preset, epsilon=epsilon)), []
        run.train(lambda progress: answers.append((progress.stage, progress.warning)))  # noqa: B023
        run.close()
        said[preset, epsilon] = [text for _, text in answers if text]
        assert all(stage == "histogram" for stage, text in answers if text)
    assert "stand out from the noise" in said["transitions", 0.1][0]
    assert "--preset popularity" in said["transitions", 0.1][0]
    assert "--preset popularity" not in said["popularity", 0.1][0]
    assert said["transitions", 8.0] == []


def test_python_warns_of_a_histogram_of_noise():
    with pytest.warns(UserWarning, match="stand out from the noise"):
        DPFormer(preset="transitions", epsilon=0.1, delta=1e-4, seed=5).fit(
            demo_frame().filter(demo_frame()["user_id"] < "reader-0400")
        )


def test_a_distilled_network_knows_the_whole_head(data, tmp_path):
    small = {"network.vocabulary": 40, "network.d": 8, "network.max_length": 8, "distil.steps": 2}
    run = start(tmp_path / "run", data, recipe("distilled", **small))
    run.train()
    run.close()
    model = load_model(tmp_path / "run").model
    head = model.transitions.head
    assert len(head) > 40
    assert model.network.vocabulary()[head].all()


def test_the_command_line_warns_of_a_histogram_of_noise_even_when_quiet(dpformer, data, tmp_path):
    for epsilon, warned in ((0.1, True), (8, False)):
        done = dpformer(
            *("fit", data, "--run", tmp_path / f"run-{epsilon}", "--preset", "transitions"),
            *("--epsilon", epsilon, "--delta", "1e-4", "--quiet"),
        )
        assert done.code == 0, done
        assert ("warning: only" in done.err) == warned
