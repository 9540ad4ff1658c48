"""Every model that comes with the package, freshly made on embedded data, and verified as any run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data import demo_frame, prepare, save
from dpformer.fit.recipe import make_recipe
from dpformer.fit.session import begin
from dpformer.trust.verify.checks import Verification
from dpformer.trust.verify.run import verify_run

USERS = 60
BUILT_IN: dict[str, dict[str, Any]] = {
    "the default preset": {"preset": "best", "epochs": 0.0, "distil": 2},
    "preset whole": {"preset": "whole", "vocabulary": 40},
    "transformer": {},
    "transformer, Re-Attention": {"reattention": "logits", "blocks": 2, "heads": 2},
    "transformer, untied, post-norm, flat": {"tied": False, "norm": "post", "rule": "flat", "max_norm": 0.3},
    "transformer, small vocabulary": {"vocabulary": 40, "popularity_bias": True, "recency": 1.0, "identity": True},
    "gru": {"model": "gru"},
    "lstm": {"model": "lstm"},
    "transitions": {"model": "transitions"},
    "popularity": {"model": "popularity"},
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
    begin(folder, data, make_recipe(**{"epochs": 2.0, "d": 16, "max_length": 12, **BUILT_IN[model]})).train()
