"""Trackers that write to MLflow and to Weights & Biases; see `events` for what they get.

Names of figures that carry no noise begin with `not_private/`: whoever can open the tracker can read them, so the server must be
as private as the data.
"""

from __future__ import annotations

from typing import Any

from dpformer.errors import DPFormerError
from dpformer.fit.events import Event


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
        if event["event"] == "start":
            if self.run_id is None:
                self.run_id = self._client.create_run(self._experiment).info.run_id
                for name, value in flat_settings(event).items():
                    self._client.log_param(self.run_id, name, value)
        elif event["event"] == "step":
            for name, value in labelled(event).items():
                self._client.log_metric(self._run(), name, value, step=event["step"])
        elif event["event"] == "end":
            self._client.set_terminated(self._run(), "FINISHED" if event["released"] else "KILLED")

    def _run(self) -> str:
        assert self.run_id is not None  # every training begins with "start"
        return self.run_id


class WeightsAndBiases:
    """Writes a run to Weights & Biases. options: those of `wandb.init`, such as project and mode."""

    def __init__(self, **options: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise DPFormerError("Weights & Biases is not installed: pip install 'dpformer[wandb]'") from None
        self._init, self._options = wandb.init, options
        self._run: Any = None

    def on_event(self, event: Event) -> None:
        """Start opens a run, step logs, end closes it."""
        if event["event"] == "start":
            self._run = self._init(config=flat_settings(event), **self._options)
        elif event["event"] == "step":
            self._run.log(labelled(event), step=event["step"])
        elif event["event"] == "end":
            self._run.finish(exit_code=0 if event["released"] else 1)


def labelled(event: Event) -> dict[str, float]:
    """The figures of a step, those without noise under `not_private/`.

    >>> labelled({"event": "step", "step": 1, "learning_rate": 0.1, "loss": 6.0, "not_private": ["loss"]})
    {'learning_rate': 0.1, 'not_private/loss': 6.0}
    """
    hidden = event["not_private"]
    names = [name for name in event if name not in ("event", "step", "not_private")]
    return {f"not_private/{name}" if name in hidden else name: float(event[name]) for name in names}


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
