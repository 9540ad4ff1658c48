"""`DPFormer`: from a log to private recommendations in three lines."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.artifact import Artifact, load
from dpformer.artifact.layout import RELEASED
from dpformer.data import Dataset, prepare
from dpformer.data import save as save_data
from dpformer.errors import DPFormerError
from dpformer.evaluation import Evaluation, evaluate, held_out
from dpformer.fit.events import Tracker
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.fit.stage import Progress
from dpformer.privacy import PrivacyStatement


class DPFormer:
    """A next-item recommender with user-level differential privacy.

    `DPFormer(epsilon=8, delta=1e-5, ...)` takes the settings of `dpformer fit` by name (see docs/training.md) and a `preset`.

    fit         a log: a path, or a pandas, polars or Arrow frame with user_id, item_id and, if there is one, timestamp
    recommend   for any `histories`, or for `users` of the log that it was fitted on
    evaluate    on the held-out items of that log; not private
    privacy     the statement
    """

    def __init__(self, preset: str = "default", **settings: Any) -> None:
        self.recipe = make_recipe(preset, **settings)
        self._folder: Path | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._dataset: Dataset | None = None
        self._artifact: Artifact | None = None

    def fit(
        self,
        log: Any,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        trackers: Iterable[Tracker] = (),
        **columns: str,
    ) -> DPFormer:
        """Prepare the log (`columns`: user, item, time, where names are unusual) and train on it; returns itself.

        `trackers` follow the training (see docs/training.md).
        """
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise DPFormerError(
                "DPFormer.fit trains in one process, and torchrun started several: each would spend the whole budget on the same "
                "people. Prepare the log and start torchrun ... -m dpformer fit (docs/guides/several-machines.md)"
            )
        self._dataset = log if isinstance(log, Dataset) else prepare(log, **columns)  # type: ignore[arg-type]
        self._temporary = tempfile.TemporaryDirectory(prefix="dpformer-")
        folder = Path(self._temporary.name)
        save_data(self._dataset, folder / "data")
        run = start(folder / "run", folder / "data", self.recipe)
        run.train(on_progress, trackers=trackers)
        run.close()
        shutil.rmtree(folder / "data")
        self._folder = folder / "run"
        self._artifact = load(self._folder)
        return self

    def recommend(
        self,
        users: Sequence[Any] | None = None,
        histories: Sequence[Sequence[Any]] | None = None,
        k: int = 10,
        seen: bool = False,
    ) -> pl.DataFrame:
        """Rank the best k items for each history.

        Returns columns `user_id` (or `history`, its place), `rank`, `item_id`, `title` if there is one, `score`. Items of a
        history that the model does not know are skipped; an empty history is ranked by the released popularity.
        """
        artifact = self._fitted()
        if (users is None) == (histories is None):
            raise DPFormerError("give either users=[...] or histories=[[...], ...]")
        if histories is not None:
            return artifact.recommend(histories, k, seen)
        assert users is not None
        if self._dataset is None:
            raise DPFormerError("a loaded model has no users: give histories=[[...], ...]")
        sequences = self._dataset.sequences
        place = {str(user): n for n, user in enumerate(sequences.users)}
        for user in users:
            if str(user) not in place:
                raise DPFormerError(f"user {user!r} is not in the log; give histories=[[...], ...] for new people")
        numbers = self._dataset.numbers_in(artifact.catalogue)
        histories = [[n for n in numbers[sequences[place[str(user)]]].tolist() if n] for user in users]
        best, values = artifact.rank(histories, k, seen)
        frame = artifact.frame(best, values)
        names = pl.Series("user_id", [users[n] for n in frame["history"]])
        return frame.drop("history").insert_column(0, names)

    def evaluate(self, item: str = "test") -> Evaluation:
        """Full ranking on the held-out item of the log. The figures are not private."""
        if self._dataset is None:
            raise DPFormerError("a loaded model has no data to be evaluated on: use `dpformer evaluate RUN DATA`")
        artifact = self._fitted()
        held = held_out(self._dataset.sequences, item).renumbered(self._dataset.numbers_in(artifact.catalogue))
        return evaluate(artifact, held, len(artifact.catalogue))

    @property
    def privacy(self) -> PrivacyStatement:
        """What is promised, on what assumptions, and what is not."""
        return self._fitted().statement

    def save(self, folder: Path | str) -> None:
        """Write the released files and the ledger to a new folder, and no other file of the run folder."""
        published = self._folder
        self._fitted()
        assert published is not None
        if Path(folder).exists():
            raise DPFormerError(f"{folder}: exists already; choose another folder")
        Path(folder).mkdir(parents=True)
        for name in RELEASED:
            if (published / name).exists():  # a run with epsilon inf has no ledger
                shutil.copyfile(published / name, Path(folder) / name)

    @classmethod
    def load(cls, folder: Path | str) -> DPFormer:
        """A saved model, or the folder of a finished run."""
        artifact, recipe = load(folder), read_recipe(Path(folder))
        model = cls.__new__(cls)
        model.recipe, model._folder, model._artifact = recipe, Path(folder), artifact
        model._temporary = model._dataset = None
        return model

    def _fitted(self) -> Artifact:
        if self._artifact is None:
            raise DPFormerError("this DPFormer is not fitted yet: call fit first, or DPFormer.load")
        return self._artifact
