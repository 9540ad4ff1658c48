"""`DPFormer`: from a log to private recommendations in three lines."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpformer import notebook
from dpformer.artifact import Artifact, load
from dpformer.artifact.layout import CONFIG, LEDGER, LEDGER_HEAD, PRIVACY, RELEASED
from dpformer.cli.progress import show_progress
from dpformer.data import Dataset, like, prepare
from dpformer.data import save as save_data
from dpformer.errors import DPFormerError
from dpformer.evaluation import Evaluation, evaluate, held_out
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.fit.stage import Progress
from dpformer.fit.trackers import Tracker
from dpformer.models.top import Numbers
from dpformer.privacy import PrivacyStatement
from dpformer.privacy.account import PeopleAccount

# Marks a temporary run whose ledger `save` has copied.
_SAVED = "saved"


class DPFormer:
    """A next-item recommender with user-level differential privacy.

    `DPFormer(epsilon=8, delta=1e-5, ...)` takes the settings of `dpformer fit` by name (see docs/training.md) and a `preset`;
    `account` is the folder of an account of people, which `fit` charges before it asks anything.

    fit         a log: a path, or a pandas, polars or Arrow frame with user_id, item_id and, if there is one, timestamp
    recommend   for any `histories`, or for `users` of the log that it was fitted on
    evaluate    on the held-out items of that log; not private
    privacy     the statement
    """

    def __init__(self, preset: str = "default", account: Path | str | None = None, **settings: Any) -> None:
        self.recipe = make_recipe(preset, **settings)
        self._given: dict[str, Any] | None = {"preset": preset, "account": account, **settings}
        self._account = None if account is None else PeopleAccount(account)
        self._folder: Path | None = None
        self._dataset: Dataset | None = None
        self._artifact: Artifact | None = None

    def fit(
        self,
        log: Any,
        on_progress: Callable[[Progress], None] | None = None,
        trackers: Iterable[Tracker] = (),
        progress: bool = False,
        **options: Any,
    ) -> DPFormer:
        """Prepare the log (`options`: those of `prepare`, such as time="purchased_at") and train on it; returns itself.

        `trackers` follow the training (see docs/training.md); `progress` shows it, in a notebook and on a terminal. The ledger
        of what was spent is in `folder`, and stays there until `save` copies it.
        """
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise DPFormerError(
                "DPFormer.fit trains in one process, and torchrun started several: each would spend the whole budget on the same "
                "people. Prepare the log and start torchrun ... -m dpformer fit (docs/training.md)"
            )
        self._dataset = log if isinstance(log, Dataset) else prepare(log, **options)
        self._folder = self._artifact = None
        folder = Path(tempfile.mkdtemp(prefix="dpformer-"))
        # When this object goes, the model goes; what it spent stays on record.
        weakref.finalize(self, _keep_ledger, folder / "run")
        try:
            save_data(self._dataset, folder / "data")
            self._folder = folder / "run"
            run = start(self._folder, folder / "data", self.recipe, account=self._account)
            with show_progress(run.plan, quiet=not progress) as shown:
                run.train(functools.partial(_watch, on_progress or shown), trackers=trackers)
            run.close()
        finally:
            shutil.rmtree(folder / "data")
        self._artifact = load(self._folder)
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings that this object was made with, by name, as scikit-learn has it. `deep` changes nothing."""
        if self._given is None:
            raise DPFormerError("a loaded model was not made from settings: its `recipe` has all values")
        return dict(self._given)

    def set_params(self, **params: Any) -> DPFormer:
        """Change settings for the next `fit`; returns itself. A fitted model stays what it is."""
        given = self.get_params() | params
        fresh = DPFormer(**given)  # checks all of them
        self.recipe, self._account, self._given = fresh.recipe, fresh._account, given
        return self

    def __repr__(self) -> str:
        made = f"recipe of {self._folder}" if self._given is None else ", ".join(_settings(self._given))
        fitted = f" {self.privacy.text().splitlines()[0]}" if self._artifact is not None else " not fitted"
        return f"<DPFormer({made}):{fitted}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [] if self._given is None else [("settings", ", ".join(_settings(self._given)))]
        if self._artifact is not None:
            text = self.privacy.text().splitlines()
            rows += [("model", f"{self._artifact.model.spec.name} over {len(self._artifact.catalogue):,} items")]
            rows += [("privacy", text[0]), ("run folder", str(self._folder))]
        return notebook.table("DPFormer", (), rows or [("", "not fitted")])

    @property
    def folder(self) -> Path | None:
        """The run folder: of `load`, else a temporary one, of which the ledger is left when this object goes without `save`."""
        return self._folder

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: settings only. A fitted object holds people's data."""
        if self._artifact is not None or self._dataset is not None:
            raise DPFormerError(
                "a fitted DPFormer is neither pickled nor copied, because it holds the people's data; write the model with "
                'model.save("folder") and read it with DPFormer.load("folder")'
            )
        return self.__dict__.copy()

    def recommend(
        self,
        users: Sequence[Any] | None = None,
        histories: Sequence[Sequence[Any]] | None = None,
        k: int = 10,
        seen: bool = False,
        log: Any = None,
        only: Sequence[Any] | None = None,
        exclude: Sequence[Any] = (),
        where: str | None = None,
        exclude_for: Mapping[Any, Sequence[Any]] | None = None,
        **reading: Any,
    ) -> pl.DataFrame:
        """Rank the best k items for each history.

        users: ids of the log that it was fitted on, or of `log`, another one, which is read in the same way; `reading` changes
        that, such as time="date". Without `users`: all of `log`. A user who is in neither is left out, with a warning.
        only, exclude: ids or titles to recommend alone, or not at all; where: an SQL condition on columns of the catalogue;
        exclude_for: items not to recommend to a user, by id. Lists that are shorter than k for that reason give a warning.

        Returns columns `user_id` (or `history`, its place), `rank`, `item_id`, `title` if there is one, `score`. Items of a
        history that the model does not know are skipped, with a warning; an empty history is ranked by the released popularity.
        """
        artifact = self._fitted()
        if (users is None and log is None) == (histories is None) or isinstance(users, str | bytes):
            raise DPFormerError("give either histories=[[...], ...], or users=[...], or a log")
        allowed, unknown = artifact.allowed(only, exclude, where)
        if unknown:
            warnings.warn(f"{len(unknown):,} filtered items are not in the catalogue: {unknown[:5]}", stacklevel=2)
        if histories is not None:
            if exclude_for:
                raise DPFormerError("exclude_for names users: give it with users=[...] or a log")
            read = [artifact.encode(history) for history in histories]
            encoded: Numbers = [numbers for numbers, _ in read]
            if skipped := list(dict.fromkeys(item for _, items in read for item in items)):
                text = f"{len(skipped):,} items of histories are not in the catalogue and skipped: {skipped[:5]}"
                warnings.warn(text, stacklevel=2)
            frame = artifact.frame(*artifact.rank(encoded, k, seen, allowed))
        else:
            names, encoded = self._histories(users, log, reading)
            own = {str(user): artifact.encode(items)[0] for user, items in (exclude_for or {}).items()}
            left_out = [own.get(str(user), []) for user in names] if own else None
            frame = artifact.frame(*artifact.rank(encoded, k, seen, allowed, left_out))
        short = len(encoded) - int((frame["rank"] == min(k, artifact.item_count)).sum())
        if short:
            warnings.warn(f"{short:,} of {len(encoded):,} lists have fewer than {k} items: no more pass", stacklevel=2)
        if histories is not None:
            return frame
        return frame.drop("history").insert_column(0, names[frame["history"]].alias("user_id"))

    def _histories(self, users: Sequence[Any] | None, log: Any, reading: dict[str, Any]) -> tuple[pl.Series, Numbers]:
        """Users of the log that it was fitted on, or of another one, and their items by number."""
        artifact, dataset = self._fitted(), self._dataset
        if log is not None:
            dataset = prepare(log, **like(artifact.log, single_events=True, **reading))
        if dataset is None:
            raise DPFormerError("a loaded model has no users: give histories=[[...], ...] or log=...")
        places, unknown = dataset.sequences.places(users)
        if unknown and not len(places):
            raise DPFormerError(f"user {unknown[0]!r} is not in the log; give histories=[[...], ...] for new people")
        if unknown:
            warnings.warn(f"{len(unknown):,} users are not in the log and left out: {unknown[:5]}", stacklevel=3)
        sequences = dataset.sequences.renumbered(dataset.numbers_in(artifact.catalogue))
        return sequences.users[places], [sequences[n] for n in places]

    def similar(
        self,
        item: Any,
        k: int = 10,
        where: str | None = None,
        only: Sequence[Any] | None = None,
        exclude: Sequence[Any] = (),
    ) -> pl.DataFrame:
        """The items most like an item (id or title), by the released model alone; filters as in `recommend`."""
        return self._fitted().similar(item, k, only, exclude, where)

    def evaluate(self, item: str = "test") -> Evaluation:
        """Full ranking on the held-out item of the log, "test" or "validation". The figures are not private."""
        if not isinstance(item, str):
            raise DPFormerError(
                "item is 'test' or 'validation', of the log that was fitted; for other data: save the model, then "
                "`dpformer evaluate FOLDER --data DATA`"
            )
        if self._dataset is None:
            raise DPFormerError(
                "a loaded model has no data to be evaluated on: use `dpformer evaluate RUN --data DATA`"
            )
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
        if self._dataset is not None:
            (published / _SAVED).touch()

    @classmethod
    def load(cls, folder: Path | str) -> DPFormer:
        """A saved model, or the folder of a finished run."""
        artifact, recipe = load(folder), read_recipe(Path(folder))
        model = cls.__new__(cls)
        model.recipe, model._folder, model._artifact, model._dataset = recipe, Path(folder), artifact, None
        model._account = model._given = None
        return model

    def _fitted(self) -> Artifact:
        if self._artifact is None:
            raise DPFormerError("this DPFormer is not fitted yet: call fit first, or DPFormer.load")
        return self._artifact


def _watch(on_progress: Callable[[Progress], None], progress: Progress) -> None:
    if progress.warning:
        warnings.warn(progress.warning, stacklevel=6)
    on_progress(progress)


def _settings(given: dict[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in given.items() if value is not None]


def _keep_ledger(run: Path) -> None:
    """Leave of a temporary run what says what was spent; nothing if nothing was charged."""
    kept = (LEDGER, LEDGER_HEAD, CONFIG, PRIVACY) if (run / LEDGER).exists() and not (run / _SAVED).exists() else ()
    for path in run.iterdir() if run.is_dir() else ():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not kept:
        shutil.rmtree(run.parent, ignore_errors=True)
