"""Every model that comes with the package, freshly made on embedded data, and verified as any run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data import demo_frame, prepare, save
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.trust.verify.checks import Verification
from dpformer.trust.verify.run import verify_run

USERS = 60
_SMALL = {"d": 16, "max_length": 12}
_STEPS = {**_SMALL, "epochs": 2.0, "batch_size": None}
# One block, pre-norm, the whole catalogue, no dropout.
_PLAIN = {**_STEPS, "preset": "paper", "blocks": 1, "norm": "pre", "dropout": 0.0, "reattention": "off"}
BUILT_IN: dict[str, dict[str, Any]] = {
    "the default preset": {**_SMALL, "distil.steps": 2},
    "preset pure": {**_STEPS, "preset": "pure", "vocabulary": 40},
    "preset whole": {**_STEPS, "preset": "whole", "vocabulary": 40},
    "transformer": _PLAIN,
    "transformer, Re-Attention": {**_PLAIN, "reattention": "logits", "blocks": 2},
    "transformer, untied, post-norm, flat": {**_PLAIN, "tied": False, "norm": "post", "max_norm": 0.3},
    "gru": {**_PLAIN, "model": "gru"},
    "lstm": {**_PLAIN, "model": "lstm"},
    "transitions": {"preset": "transitions"},
    "popularity": {"preset": "popularity"},
}


def verify_built_in(
    names: list[str] | None = None, on_model: Callable[[str], None] = lambda name: None
) -> Iterator[Verification]:
    """Train each model for a few steps on the first readers of the embedded library, and verify the folder."""
    with tempfile.TemporaryDirectory(prefix="dpformer-verify-") as name:
        data = embedded(Path(name) / "data")
        for k, model in enumerate(names or BUILT_IN):
            on_model(model)
            folder = Path(name) / f"run-{k}"
            make(model, folder, data)
            yield verify_run(folder, subject=model)


def embedded(folder: Path) -> Path:
    """The first readers of the embedded library, prepared."""
    log = demo_frame()
    readers = log["user_id"].unique(maintain_order=True)[:USERS]
    save(prepare(log.filter(pl.col("user_id").is_in(readers.to_list()))), folder)
    return folder


def make(model: str, folder: Path, data: Path) -> None:
    """A finished run of a built-in model, of a few steps."""
    start(folder, data, make_recipe(**BUILT_IN[model])).train()
