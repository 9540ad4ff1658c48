"""What trackers are told, that it is labelled, and that none of them can end a run."""

import json
import sys

import pytest

from dpformer import DPFormer
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import resume, start
from dpformer.fit.trackers import Event, MLflow
from tests.fit.conftest import small_log
from tests.recipes import small_recipe


class Notebook:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


class Broken:
    calls = 0

    def on_event(self, event: Event) -> None:
        self.calls += 1
        event["loss"] = "spoilt"
        raise RuntimeError("no such dashboard")


def test_events_through_a_stop_and_a_resumption(data, tmp_path):
    first, second = Notebook(), Notebook()
    run = start(tmp_path / "run", data, small_recipe())
    assert not run.train(should_stop=lambda: run.step == 4, trackers=[first])
    run.close()
    kinds = [event["event"] for event in first.events]
    assert [kind for kind in kinds if kind != "stage"] == ["start", *["step"] * 4, "end"]
    steps = first.events[0]["steps"]
    assert steps == run.plan.steps > 4
    assert first.events[0]["budget"] == {"epsilon": 20.0, "delta": 1e-3}
    assert first.events[-1] == {"event": "end", "step": 4, "released": False}
    assert resume(tmp_path / "run").train(trackers=[second])
    assert [event["step"] for event in second.events] == [4, *range(5, steps + 1), steps]
    assert second.events[-1]["released"]
    made = [event for event in first.events + second.events if event["event"] == "step"]
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == made
    # Whatever comes from people is named as such; the rest is known without them.
    assert all(
        set(event) - set(event["not_private"]) == {"event", "step", "learning_rate", "not_private"} for event in made
    )


def test_a_broken_tracker_is_dropped_and_the_run_goes_on(data, tmp_path):
    broken, notebook = Broken(), Notebook()
    with pytest.warns(UserWarning, match="Broken failed and gets no more events: no such dashboard"):
        assert start(tmp_path / "run", data, small_recipe()).train(trackers=[broken, notebook])
    assert broken.calls == 1
    assert notebook.events[-1]["released"]
    assert "spoilt" not in repr(notebook.events)


def test_every_stage_tells_how_far_it_is(data, tmp_path):
    """And says nothing that would need people's data."""
    notebook, recipe = Notebook(), make_recipe("distilled", epsilon=20.0, delta=1e-3, **{"distil.steps": 3, "d": 8})
    assert start(tmp_path / "run", data, recipe).train(trackers=[notebook])
    kinds = [event["event"] for event in notebook.events]
    assert kinds == ["start", *["stage"] * (len(kinds) - 2), "end"]
    stages = [tuple(event[key] for key in ("stage", "done", "total")) for event in notebook.events[1:-1]]
    expected = [
        ("histogram", 0, 1),
        ("histogram", 1, 1),
        ("transitions", 0, 1),
        ("transitions", 1, 1),
        ("distil", 0, 1),
    ]
    assert stages == [*expected, *(("distil", step, 3) for step in (1, 2, 3))]


def test_an_infinite_epsilon_is_json(data, tmp_path):
    notebook = Notebook()
    options = {"epsilon": float("inf"), "delta": 1e-3, "d": 8, "epochs": 1}
    DPFormer("pure", **options).fit(small_log(), trackers=[notebook])
    assert json.loads(json.dumps(notebook.events, allow_nan=False))[0]["budget"]["epsilon"] == "inf"


def test_tensorboard_reads_what_fit_wrote(dpformer, data, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    small = [
        "--preset",
        "pure",
        "--epsilon",
        "20",
        "--delta",
        "1e-3",
        "--set",
        "d=8",
        "--set",
        "max-length=6",
        "--set",
        "epochs=2.5",
    ]
    (tmp_path / "board").mkdir(mode=0o755)
    done = dpformer("fit", data, "--run", tmp_path / "run", *small, "--tensorboard", tmp_path / "board", "--quiet")
    assert done.code == 0, done.err
    assert "not to be published" in done.err
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "board").iterdir()} == {0o600}
    found = accumulator.EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"not private/loss", "learning_rate"}
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [point.value for point in found.Scalars("not private/loss")] == pytest.approx(losses)
    text = found.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "Do not publish it" in text
    assert "epsilon 20.0" in text


def test_without_tensorboard_nothing_is_begun(dpformer, data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = dpformer("fit", data, "--run", tmp_path / "run", "--tensorboard", tmp_path / "board")
    assert done.code == 2
    assert "pip install 'dpformer[tensorboard]'" in done.err
    assert not (tmp_path / "run").exists()


def test_mlflow_gets_settings_and_labelled_figures(data, tmp_path, monkeypatch):
    """The real MLflow, with a store of files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    store = (tmp_path / "store").as_uri()
    tracker = MLflow("books", store)
    run = start(tmp_path / "run", data, small_recipe())
    assert not run.train(should_stop=lambda: run.step == 4, trackers=[tracker])
    run.close()
    client = mlflow.MlflowClient(store)
    assert client.get_run(tracker.run_id).info.status == "KILLED"
    assert resume(tmp_path / "run").train(trackers=[tracker])
    made = client.get_run(tracker.run_id)
    assert made.info.status == "FINISHED"
    assert made.data.params["epsilon"] == "20.0"
    assert set(made.data.metrics) == {"learning_rate", "not_private/loss"}
    steps = [point.step for point in client.get_metric_history(tracker.run_id, "not_private/loss")]
    assert steps == list(range(1, run.plan.steps + 1))
