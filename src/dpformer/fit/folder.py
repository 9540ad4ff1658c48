"""The folder of a run of `dpformer fit`: its settings, its data and its state. `training.folder` has what all runs share."""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from dpformer import __version__
from dpformer.artifact import check_version, complete, is_written, read_config
from dpformer.artifact.layout import CONFIG, EVENTS, FORMAT, LOCAL, LOCK, MODEL, PRIVATE, VERSION
from dpformer.artifact.read import has_checkpoint
from dpformer.data import Dataset, load
from dpformer.data.store import SEQUENCES
from dpformer.errors import DPFormerError
from dpformer.files import read_json, sha256, sha256_of, to_json, write_file, write_json
from dpformer.fit.presets import command
from dpformer.fit.recipe import Recipe
from dpformer.privacy import Keys, PrivacyPlan
from dpformer.privacy.account import PeopleAccount
from dpformer.training.folder import RunFolder


def refuse_used(folder: Path) -> None:
    """A run begins in a new folder."""
    with explained(folder):
        used = folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))
    if used:
        hint = f"continue it with: dpformer resume {folder}, or " if (folder / PRIVATE).is_dir() else ""
        raise DPFormerError(f"{folder}: exists already; {hint}choose another folder with --run")


def hold_new(folder: Path) -> RunFolder:
    """Make the folder of a new run and hold it. Of two processes that begin at once, one gets it."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    held = RunFolder(folder)
    with held.closed_on_error():
        refuse_used(folder)
    return held


def hold(folder: Path) -> RunFolder:
    """Hold the folder of a run that is there."""
    read_recipe(folder)
    return RunFolder(folder)


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run."""
    config = read_config(folder)
    check_version(folder, config)
    try:
        return Recipe.model_validate(config["recipe"])
    except (KeyError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DPFormerError(f"{folder / CONFIG}: is damaged or of another version ({reason})") from None


def finish_written(folder: Path) -> bool:
    """Put the release of a run in place whose process ended after it was written. False where there is none."""
    if not is_written(folder):
        return False
    held = hold(folder)
    with held.closed_on_error():
        complete(folder)
    held.close()
    return True


def begin(
    held: RunFolder, data: Path, recipe: Recipe, plan: PrivacyPlan, log: dict[str, Any], account: PeopleAccount | None
) -> None:
    """Charge the account of people, then make what every run folder has: config, ledger, a private place. log: of `Dataset`."""
    held.begin(plan, account, (CONFIG, config_file(recipe, log)))
    local = {"data": str(data.resolve())}
    local |= {} if account is None else {"account": str(account.folder.resolve())}
    write_json(held.path / LOCAL, local, mode=0o600)


def config_file(recipe: Recipe, log: dict[str, Any]) -> bytes:
    """config.json: the recipe for people, what to type for such a run, and how the log was read."""
    config: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dpformer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": recipe.settings(),
        "command": command(recipe),
        "log": log,
    }
    return to_json(config)


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


def reopen(held: RunFolder, data: Path | None = None) -> tuple[Dataset, Keys, dict[str, Tensor], dict[str, Any]]:
    """What an unfinished run left: its data, and keys, tensors and values of its last checkpoint. Opens its ledger."""
    folder = held.path
    if (folder / MODEL).exists() and not has_checkpoint(folder):
        raise DPFormerError(f"{folder}: is finished; its model is released")
    tensors, values = held.load()
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
    return dataset, held.reopen_ledger(values), tensors, values


def data_of(folder: Path) -> Path:
    """Where the data of a run was."""
    return Path(read_json(folder / LOCAL)["data"])


def drop_events(folder: Path, step: int, any_steps: bool) -> None:
    """Drop events of steps after `step`, which will be made again, and a torn last line."""
    path = folder / EVENTS
    with explained(folder):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines or any_steps:
        write_file(path, b"".join(line for line in lines[:step] if line.endswith(b"\n")), 0o600)


def account_of(folder: Path) -> PeopleAccount | None:
    """The account of people that a run was charged to."""
    place = read_json(folder / LOCAL).get("account")
    return None if place is None else PeopleAccount(place)


def _hash(data: Path, salt: bytes) -> str:
    return hmac.new(salt, sha256_of([data / SEQUENCES]).encode(), hashlib.sha256).hexdigest()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise DPFormerError(
            f"{folder}: cannot be written ({error.strerror}); what was saved before is untouched"
        ) from None


@contextmanager
def enough_memory(folder: Path) -> Iterator[None]:
    """Turn an allocation that failed into one line.

    A step is charged when its sum is complete, and what was charged is made again with the same noise: nothing is spent twice.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        raise DPFormerError(
            f"{folder}: out of memory; nothing is lost, and nothing was spent that the ledger does not say. Close other "
            f"programs and go on with: dpformer resume {folder}; if it comes again, fit in another folder with a smaller "
            "network: --set network.d=16, or --set network.vocabulary=500"
        ) from None


def _is_shortage(error: Exception) -> bool:
    """torch has a class for devices; on the CPU its allocator raises a RuntimeError that says so."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def owner_only(path: str, flags: int) -> int:
    """Opens a file that carries no noise: for its owner only."""
    return os.open(path, flags, 0o600)
