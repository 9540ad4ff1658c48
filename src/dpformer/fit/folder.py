"""A run folder as files: who holds it, what is written when, and whether what is read is what was written."""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from pydantic import ValidationError
from safetensors.torch import save as to_safetensors

from dpformer import __version__
from dpformer.artifact.card import model_card
from dpformer.artifact.catalogue import pack_catalogue
from dpformer.artifact.sizes import column_hashes
from dpformer.data import Dataset, load
from dpformer.data.store import sequence_files
from dpformer.errors import DPFormerError
from dpformer.files import Lock, read_json, sha256, sha256_of, to_json, write_file, write_json
from dpformer.fit.checkpoint import PRIVATE, Checkpoints
from dpformer.fit.recipe import Recipe
from dpformer.privacy import Keys, PrivacyPlan, PrivacyStatement, create_ledger
from dpformer.privacy.chain import Position
from dpformer.privacy.ledger import Ledger, open_ledger

CONFIG, MODEL, ITEMS, PRIVACY, EVENTS, CARD = (
    *("config.json", "model.safetensors", "items.jsonl", "privacy.json", "events.jsonl", "README.md"),
)
# Where the data was, for `evaluate` on this machine, and whose run it is (see `jobs`); not part of the model, and without a hash
# of the data, which would confirm a guess.
LOCAL = "local.json"
# Hashes of what is released, against damage; whoever forges the one forges the other.
FILES = "files.json"
LOCKED = "run.lock"


class RunLock(Lock):
    """A run folder, held against other processes: two of them would mix their settings and their checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCKED)


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


# Format 1 had floating-point noise; see docs/privacy.md.
VERSION = 2
OLD_FORMAT = (
    "was made by an older version, whose floating-point noise leaks: a released model tells who was in the data, whatever its "
    "statement says; do not publish it, and fit again"
)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says, of any version."""
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != "dpformer-run":
        raise DPFormerError(f"{folder}: is not a run folder")
    return config


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run."""
    config = read_config(folder)
    if config.get("version") == 1:
        raise DPFormerError(f"{folder}: {OLD_FORMAT}")
    if config.get("version") != VERSION:
        raise DPFormerError(f"{folder}: is of format {config.get('version')!r}, not {VERSION}; update dpformer")
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


def make_folder(folder: Path, data: Path, recipe: Recipe, plan: PrivacyPlan, job: str | None = None) -> Ledger | None:
    """What every run folder has from the start: config, ledger, and a private place. `job`: see `jobs`."""
    write_file(folder / CONFIG, config_file(recipe))
    ledger = create_ledger(folder, plan) if plan.private else None
    with closed_on_error(ledger), explained(folder):
        Checkpoints(folder).make_folder()
        local = {"data": str(data.resolve())} | ({} if job is None else {"job": job})
        write_json(folder / LOCAL, local, mode=0o600)
    return ledger


def config_file(recipe: Recipe, items: int | None = None) -> bytes:
    """config.json; with the number of items once the model is released."""
    config: dict[str, Any] = {
        "format": "dpformer-run",
        "version": VERSION,
        "dpformer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": recipe.settings(),
    }
    return to_json(config if items is None else config | {"items": items})


@dataclass(frozen=True)
class Begun:
    """What is fixed when a run begins, and kept in each of its checkpoints.

    source: where the data is, and a salted hash to know it again by: a bare one would confirm a guess of the data.
    config: the hash of config.json. seed: of the initial weights. threads: float32 sums are rounded in another order with more.
    """

    source: dict[str, str]
    config: str
    seed: int
    threads: int

    @classmethod
    def new(cls, folder: Path, data: Path, seed: int | None) -> Begun:
        """For a run that begins now in `folder`, whose config.json is written."""
        salt = secrets.token_bytes(32)
        source = {"path": str(data.resolve()), "salt": salt.hex(), "hash": _hash(data, salt)}
        own = secrets.randbits(63) if seed is None else seed
        return cls(source, sha256(folder / CONFIG), own, torch.get_num_threads())


def begun_values(begun: Begun, keys: Keys, ledger: Ledger | None) -> dict[str, Any]:
    """What every checkpoint has."""
    return {"begun": asdict(begun), "keys": keys.state(), "ledger": None if ledger is None else place_of(ledger)}


def save_begun(folder: Path, begun: Begun, keys: Keys, ledger: Ledger | None) -> None:
    """The first checkpoint, before anything is asked: an interrupted run asks again with the same keys."""
    Checkpoints(folder).save({"none": torch.zeros(0)}, begun_values(begun, keys, ledger))


def place_of(ledger: Ledger) -> dict[str, Any]:
    """Where a ledger stands, for the checkpoint that is to go on with it."""
    position = ledger.position()
    return {"run_id": ledger.run_id, "entries": position.entries, "hash": position.hash}


def release_files(
    recipe: Recipe, statement: PrivacyStatement, catalogue: pl.DataFrame, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, bytes]]:
    """The files of a released model."""
    files = {
        CONFIG: config_file(recipe, len(catalogue)),
        PRIVACY: statement.to_json().encode(),
        CARD: model_card(recipe, statement, len(catalogue)).encode(),
        MODEL: to_safetensors(tensors),
    }
    hashes: dict[str, Any] = {name: sha256(files[name]) for name in (CONFIG, PRIVACY, MODEL)}
    yield from files.items()
    yield ITEMS, pack_catalogue(catalogue)
    yield FILES, to_json(hashes | {ITEMS: column_hashes(catalogue)})


def reopen(
    folder: Path, data: Path | None = None
) -> tuple[Dataset, Ledger | None, dict[str, torch.Tensor], dict[str, Any]]:
    """What an unfinished run left: its data, its ledger, and the tensors and values of its last checkpoint."""
    checkpoints = Checkpoints(folder)
    if (folder / MODEL).exists() and not checkpoints.any_left():
        raise DPFormerError(f"{folder}: is finished; its model is released")
    tensors, values = checkpoints.load()
    begun = Begun(**values["begun"])
    if sha256(folder / CONFIG) != begun.config:
        raise DPFormerError(
            f"{folder / CONFIG}: is damaged or was changed (sha256 differs); put back the file that the run began with, or fit "
            "again in another folder"
        )
    data = data or Path(begun.source["path"])
    dataset = load(data)
    if _hash(data, bytes.fromhex(begun.source["salt"])) != begun.source["hash"]:
        raise DPFormerError(f"{data}: is not the data that the run began with; give that with --data")
    position = values.get("ledger")
    ledger = None
    if position is not None:
        ledger = open_ledger(folder, Position(position["entries"], position["hash"]), position["run_id"])
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
    """Where the data of a run was."""
    return Path(read_json(folder / LOCAL)["data"])


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and "item_id" in value


def _compare(folder: Path, known: dict[str, Any], cure: str) -> None:
    for name, expected in known.items():
        if name in (CONFIG, ITEMS, PRIVACY, MODEL) and sha256(folder / name) != expected:
            raise DPFormerError(f"{folder / name}: is damaged or was changed (sha256 differs); {cure}")


def _hash(data: Path, salt: bytes) -> str:
    return hmac.new(salt, sha256_of(sequence_files(data)).encode(), hashlib.sha256).hexdigest()


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
