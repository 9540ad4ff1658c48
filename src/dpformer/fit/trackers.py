"""Trackers: objects that follow a training. `events.jsonl` is always written; these come on top.

A tracker is any object with `on_event(event)`. Events are plain dictionaries, ready for JSON:

    {"event": "start", "step": 0, "steps": 120, "recipe": {...}, "budget": {"epsilon": 8.0, "delta": 1e-05}}
    {"event": "stage", "stage": "distil", "done": 60, "total": 120}
    {"event": "step", "step": 1, "learning_rate": 0.01, "loss": 6.2, "not_private": ["loss"]}
    {"event": "end", "step": 120, "released": true}

Stages before the steps (histogram, transitions, distil) tell how far they are, from 0 on. `start` comes again when a run is
resumed: steps after its `step` are then made again. `not_private` names what was computed on people's data without noise: whoever
can open a tracker can read it, so the tracker must be as private as the data. Those below put it under names of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from dpformer.errors import DPFormerError

Event = dict[str, Any]


class Tracker(Protocol):
    """Follows a training. An exception from it does not end the run: the tracker is dropped, with a warning."""

    def on_event(self, event: Event) -> None:
        """Called after each step and each part of a stage, and at the start and the end."""


class Trackers:
    """Several trackers as one that does not fail."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def on_event(self, event: Event) -> None:
        """Send the event to all trackers, each with a copy of its own."""
        for tracker in list(self._trackers):
            try:
                tracker.on_event(dict(event))
            except Exception as error:  # noqa: BLE001  budget has been spent: a tracker's failure is no reason to stop
                self._trackers.remove(tracker)
                warnings.warn(f"{type(tracker).__name__} failed and gets no more events: {error}", stacklevel=2)


class TensorBoard:
    """Writes a run to a TensorBoard folder. What is not private stands under `not private/`, and a text says what that means."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise DPFormerError("TensorBoard is not installed: pip install 'dpformer[tensorboard]'") from None
        self._folder, self._writer_class = Path(folder), SummaryWriter
        self._writer: Any = None

    def on_event(self, event: Event) -> None:
        """Start opens the log (and hides steps that are made again), step adds points, end closes it."""
        if event["event"] == "start":
            # For its owner only: losses carry no noise.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            self._writer = self._writer_class(str(self._folder), purge_step=event["step"] + 1)
            for log in self._folder.glob("events.out.tfevents.*"):
                log.chmod(0o600)
            self._writer.add_text("run", _about(event), event["step"])
        elif event["event"] == "step":
            for name, value in sorted(labelled(event, "not private/").items()):
                self._writer.add_scalar(name, value, event["step"])
        elif event["event"] == "end":
            self._writer.close()


def _about(event: Event) -> str:
    """Markdown: the budget, what must not be published, the settings."""
    budget = event["budget"]
    rows = "\n".join(f"| {key} | {value} |" for key, value in event["recipe"].items())
    return (
        f"Budget: epsilon {budget['epsilon']}, delta {budget['delta']}, {event['steps']} steps.\n\n"
        "**Everything under `not private/` was computed on people's data without noise. Do not publish it.**\n\n"
        f"| setting | value |\n|---|---|\n{rows}\n"
    )


class MLflow:
    """Writes a run to MLflow: settings as parameters, steps as metrics. run_id: of the MLflow run, once the training began."""

    def __init__(self, experiment: str = "dpformer", tracking_uri: str | None = None) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise DPFormerError("MLflow is not installed: pip install 'dpformer[mlflow]'") from None
        self._client = MlflowClient(tracking_uri)
        there = self._client.get_experiment_by_name(experiment)
        self._experiment = there.experiment_id if there else self._client.create_experiment(experiment)
        self.run_id: str | None = None

    def on_event(self, event: Event) -> None:
        """Start opens a run, step adds metrics, end closes it; a resumed run goes on in the same one."""
        if event["event"] == "start" and self.run_id is None:
            self.run_id = self._client.create_run(self._experiment).info.run_id
            for name, value in flat_settings(event).items():
                self._client.log_param(self.run_id, name, value)
        elif event["event"] == "step":
            for name, value in labelled(event).items():
                self._client.log_metric(str(self.run_id), name, value, step=event["step"])
        elif event["event"] == "end":
            self._client.set_terminated(str(self.run_id), "FINISHED" if event["released"] else "KILLED")


def labelled(event: Event, prefix: str = "not_private/") -> dict[str, float]:
    """The figures of a step, those without noise under a prefix.

    >>> labelled({"event": "step", "step": 1, "learning_rate": 0.1, "loss": 6.0, "not_private": ["loss"]})
    {'learning_rate': 0.1, 'not_private/loss': 6.0}
    """
    hidden = event["not_private"]
    names = [name for name in event if name not in ("event", "step", "not_private")]
    return {f"{prefix}{name}" if name in hidden else name: float(event[name]) for name in names}


def flat_settings(event: Event) -> dict[str, Any]:
    """The settings of a recipe by dotted names.

    >>> flat_settings({"recipe": {"epsilon": 8.0, "network": {"d": 64}, "stages": [{"stage": "dpsgd", "epochs": 20}]}})
    {'epsilon': 8.0, 'network.d': 64, 'dpsgd.epochs': 20}
    """
    groups = dict(event["recipe"])
    stages = {stage["stage"]: {k: v for k, v in stage.items() if k != "stage"} for stage in groups.pop("stages", [])}
    flat: dict[str, Any] = {}
    for name, value in (groups | stages).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
