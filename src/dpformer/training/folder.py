"""A run folder as files: who holds it, what is written when, and whether what is read is what was written."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import torch
from pydantic import ValidationError
from safetensors.torch import save as to_safetensors

from dpformer import __version__
from dpformer.data import Dataset, load
from dpformer.data.hashing import sha256_of
from dpformer.data.store import sequence_files
from dpformer.errors import DPFormerError
from dpformer.privacy import Ledger, Position, PrivacyPlan, PrivacyStatement, create_ledger, open_ledger, take_lock
from dpformer.training.card import model_card
from dpformer.training.catalogue import pack_catalogue
from dpformer.training.checkpoint import PRIVATE, Checkpoints
from dpformer.training.files import read_json, sha256, write_file, write_json
from dpformer.training.recipe import Recipe
from dpformer.training.sizes import column_hashes

CONFIG, MODEL, ITEMS, PRIVACY, EVENTS, CARD = (
    *("config.json", "model.safetensors", "items.jsonl", "privacy.json", "events.jsonl", "README.md"),
)
# Where the data was, for `evaluate` on this machine, and whose run it is (see `jobs`); not part of the model, and without a hash
# of the data, which would confirm a guess.
LOCAL = "local.json"
# Hashes of what is released, against damage; whoever forges the one forges the other.
FILES = "files.json"
LOCKED = "run.lock"


class RunLock:
    """A run folder, held against other processes: two of them would mix their settings and their checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = take_lock(folder / LOCKED)

    def close(self) -> None:
        """Let another process open the run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def refuse_used(folder: Path) -> None:
    """A run begins in a new folder."""
    with explained(folder):
        used = folder.exists() and (not folder.is_dir() or any(path.name != LOCKED for path in folder.iterdir()))
    if used:
        hint = f"continue it with: dpformer resume {folder}, or " if (folder / PRIVATE).is_dir() else ""
        raise DPFormerError(f"{folder}: exists already; {hint}choose another folder with --run")


def hold_new(folder: Path) -> RunLock:
    """Make the folder of a new run and hold it. Of two processes that begin at once, one gets it."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder)
    with closed_on_error(lock):
        refuse_used(folder)
    return lock


def hold(folder: Path) -> RunLock:
    """Hold the folder of a run that is there."""
    read_recipe(folder)
    return RunLock(folder)


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run."""
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != "dpformer-run":
        raise DPFormerError(f"{folder}: is not a run folder")
    try:
        return Recipe.model_validate(config["recipe"])
    except (KeyError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DPFormerError(f"{folder / CONFIG}: is damaged or of another version ({reason})") from None


def item_count(folder: Path) -> int:
    """How many items the catalogue of a run has, as its config says."""
    items = read_json(folder / CONFIG).get("items")
    if type(items) is not int or items < 1:
        raise DPFormerError(f"{folder / CONFIG}: does not say how many items there are; copy the released folder again")
    return items


def make_folder(
    folder: Path, data: Path, dataset: Dataset, recipe: Recipe, plan: PrivacyPlan, job: str | None = None
) -> Ledger | None:
    """What every run folder has from the start: config, catalogue, ledger, and a private place. `job`: see `jobs`."""
    config = {
        "format": "dpformer-run",
        "version": 1,
        "dpformer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": recipe.settings(),
        "items": len(dataset.catalogue),
    }
    write_json(folder / CONFIG, config)
    write_file(folder / ITEMS, pack_catalogue(dataset.catalogue))
    ledger = create_ledger(folder, plan) if plan.private else None
    with closed_on_error(ledger), explained(folder):
        Checkpoints(folder).make_folder()
        local = {"data": str(data.resolve())} | ({} if job is None else {"job": job})
        write_json(folder / LOCAL, local, mode=0o600)
        known = {name: sha256(folder / name) for name in (CONFIG, ITEMS)}
        source: dict[str, Any] = {"path": str(data.resolve()), "sha256": _hash(data), "files": known}
        source |= {"columns": column_hashes(dataset.catalogue)}
        write_json(folder / PRIVATE / "data.json", source, mode=0o600)
    return ledger


def place_of(ledger: Ledger) -> dict[str, Any]:
    """Where a ledger stands, for the checkpoint that is to go on with it."""
    position = ledger.position()
    return {"run_id": ledger.run_id, "entries": position.entries, "hash": position.hash}


def write_release(
    folder: Path, recipe: Recipe, statement: PrivacyStatement, items: int, tensors: dict[str, torch.Tensor]
) -> None:
    """The released model and its papers; the model last, so that a folder with a model is whole."""
    write_file(folder / PRIVACY, statement.to_json().encode())
    write_file(folder / CARD, model_card(recipe, statement, items).encode())
    model = to_safetensors(tensors)
    known: dict[str, Any] = {name: sha256(folder / name) for name in (CONFIG, PRIVACY)}
    known |= {MODEL: sha256(model), ITEMS: _read_source(folder)["columns"]}
    write_json(folder / FILES, known)
    write_file(folder / MODEL, model)


def reopen(
    folder: Path, data: Path | None = None
) -> tuple[Dataset, Ledger | None, dict[str, torch.Tensor], dict[str, Any]]:
    """What an unfinished run left: its data, its ledger, and the tensors and values of its last checkpoint."""
    checkpoints = Checkpoints(folder)
    if (folder / MODEL).exists():
        checkpoints.remove()  # a crash may have come between the two
        raise DPFormerError(f"{folder}: is finished; its model is released")
    tensors, values = checkpoints.load()
    source = _read_source(folder)
    _compare(folder, source["files"], "put back the file that the run began with, or fit again in another folder")
    data = data or Path(source["path"])
    dataset = load(data)
    if _hash(data) != source["sha256"]:
        raise DPFormerError(f"{data}: is not the data that the run began with; give that with --data")
    known = values.get("ledger")
    ledger = None
    if known is not None:
        ledger = open_ledger(folder, Position(known["entries"], known["hash"]), known["run_id"])
    return dataset, ledger, tensors, values


def check_files(folder: Path) -> dict[str, Any]:
    """A finished run's files must be those that were released: a flipped bit in a model or a statement is not used.

    Gives the hashes of the catalogue's columns, for whoever reads it: `check_catalogue`.
    """
    known = read_json(folder / FILES)
    if not isinstance(known, dict) or not {CONFIG, PRIVACY, MODEL} <= known.keys() or not _is_table(known.get(ITEMS)):
        raise DPFormerError(f"{folder / FILES}: is damaged; copy the released folder again")
    columns: dict[str, Any] = known.pop(ITEMS)
    _compare(folder, known, "copy the released folder again")
    return columns


def check_catalogue(path: Path, catalogue: pl.DataFrame, known: dict[str, Any]) -> None:
    """Ids and titles must be those that were released."""
    found = column_hashes(catalogue)
    for name, expected in known.items():
        if found.get(name) != expected:
            raise DPFormerError(f"{path}: column {name!r} is damaged or was changed; copy the released folder again")


def data_of(folder: Path) -> Path:
    """Where the data of an unfinished run was."""
    return Path(_read_source(folder)["path"])


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and "item_id" in value


def _compare(folder: Path, known: dict[str, Any], cure: str) -> None:
    for name, expected in known.items():
        if name in (CONFIG, ITEMS, PRIVACY, MODEL) and sha256(folder / name) != expected:
            raise DPFormerError(f"{folder / name}: is damaged or was changed (sha256 differs); {cure}")


def _read_source(folder: Path) -> dict[str, Any]:
    path = folder / PRIVATE / "data.json"
    source = read_json(path)
    kinds = {"path": str, "sha256": str, "files": dict, "columns": dict}
    if not isinstance(source, dict) or any(not isinstance(source.get(key), kind) for key, kind in kinds.items()):
        raise DPFormerError(f"{path}: is damaged; fit again in another folder (what was spent stays in the ledger)")
    return source


def _hash(data: Path) -> str:
    return sha256_of(sequence_files(data))


@contextmanager
def closed_on_error(held: Ledger | RunLock | None) -> Iterator[None]:
    """Let go of a lock if what follows fails."""
    try:
        yield
    except BaseException:
        if held is not None:
            held.close()
        raise


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise DPFormerError(
            f"{folder}: cannot be written ({error.strerror}); what was saved before is untouched"
        ) from None


def owner_only(path: str, flags: int) -> int:
    """Opens a file that carries no noise: for its owner only."""
    return os.open(path, flags, 0o600)
