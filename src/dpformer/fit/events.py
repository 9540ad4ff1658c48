"""Trackers: objects that follow a training. `events.jsonl` is always written; these come on top.

A tracker is any object with `on_event(event)`. Events are plain dictionaries, ready for JSON:

    {"event": "start", "step": 0, "steps": 120, "recipe": {...}, "budget": {"epsilon": 8.0, "delta": 1e-05}}
    {"event": "stage", "stage": "distil", "done": 60, "total": 120}
    {"event": "step", "step": 1, "learning_rate": 0.01, "loss": 6.2, "not_private": ["loss"]}
    {"event": "end", "step": 120, "released": true}

Stages before the steps (histogram, transitions, distil) tell how far they are, from 0 on. `start` comes again when a run is
resumed: steps after its `step` are then made again. `not_private` names what was computed on people's data without noise;
whatever a tracker does with it, it should stay as private as the data.
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
            self._writer = self._open(event["step"] + 1)
            self._writer.add_text("run", _about(event), event["step"])
        elif event["event"] == "step":
            hidden = event["not_private"]
            for name in sorted(event.keys() - {"event", "step", "not_private"}):
                self._writer.add_scalar(f"not private/{name}" if name in hidden else name, event[name], event["step"])
        elif event["event"] == "end":
            self._writer.close()

    def _open(self, step: int) -> Any:
        """A log from this step on, for its owner only: losses carry no noise."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        writer = self._writer_class(str(self._folder), purge_step=step)
        for log in self._folder.glob("events.out.tfevents.*"):
            log.chmod(0o600)
        return writer


def _about(event: Event) -> str:
    """Markdown: the budget, what must not be published, the settings."""
    budget = event["budget"]
    rows = "\n".join(f"| {key} | {value} |" for key, value in event["recipe"].items())
    return (
        f"Budget: epsilon {budget['epsilon']}, delta {budget['delta']}, {event['steps']} steps.\n\n"
        "**Everything under `not private/` was computed on people's data without noise. Do not publish it.**\n\n"
        f"| setting | value |\n|---|---|\n{rows}\n"
    )


def started(step: int, steps: int, recipe: Event) -> Event:
    """The event at the start; recipe: settings, ready for JSON."""
    budget = {"epsilon": recipe["epsilon"], "delta": recipe["delta"]}
    return {"event": "start", "step": step, "steps": steps, "recipe": recipe, "budget": budget}


def staged(stage: str, done: int, total: int) -> Event:
    """The event when a part of a stage before the steps is done; it says nothing about the data."""
    return {"event": "stage", "stage": stage, "done": done, "total": total}


def stepped(step: int, learning_rate: float, loss: float) -> Event:
    """The event after a step. Also the line in `events.jsonl`."""
    return {"event": "step", "step": step, "learning_rate": learning_rate, "loss": loss, "not_private": ["loss"]}


def ended(step: int, released: bool) -> Event:
    """The event when a run ends: with a released model, or stopped on request."""
    return {"event": "end", "step": step, "released": released}
