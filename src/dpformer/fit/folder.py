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

import torch
from pydantic import ValidationError

from dpformer import __version__
from dpformer.artifact import check_version, complete, is_written, read_config
from dpformer.artifact.layout import CONFIG, EVENTS, FORMAT, LOCAL, LOCK, MODEL, PRIVATE, VERSION
from dpformer.data import Dataset, load
from dpformer.data.store import sequence_files
from dpformer.errors import DPFormerError
from dpformer.files import Lock, read_json, sha256, sha256_of, to_json, write_file, write_json
from dpformer.fit.presets import command
from dpformer.fit.recipe import Recipe
from dpformer.privacy import Keys, PrivacyPlan, create_ledger
from dpformer.privacy.account import PeopleAccount, RunCharge, Spending, receipts_beside
from dpformer.privacy.chain import Position
from dpformer.privacy.ledger import Ledger, open_ledger
from dpformer.training.checkpoint import Checkpoints


class RunLock(Lock):
    """A run folder, held against other processes: two of them would mix their settings and their checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCK)


def refuse_used(folder: Path) -> None:
    """A run begins in a new folder."""
    with explained(folder):
        used = folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))
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
    lock = hold(folder)
    with closed_on_error(lock):
        complete(folder)
    lock.close()
    return True


def make_folder(
    folder: Path,
    data: Path,
    recipe: Recipe,
    plan: PrivacyPlan,
    log: dict[str, Any],
    account: PeopleAccount | None = None,
) -> Ledger | None:
    """Charge the account of people, then make what every run folder has: config, ledger, a private place. log: of `Dataset`."""
    run_id, receipt = secrets.token_hex(16), None
    if account is not None:
        receipt = account.charge(RunCharge.of(run_id, folder.name, plan), receipts_beside(folder))
    write_file(folder / CONFIG, config_file(recipe, log))
    ledger = create_ledger(folder, plan, run_id, receipt) if plan.private else None
    with closed_on_error(ledger), explained(folder):
        Checkpoints(folder).make_folder()
        local = {"data": str(data.resolve())}
        local |= {} if account is None else {"account": str(account.folder.resolve())}
        write_json(folder / LOCAL, local, mode=0o600)
    return ledger


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


def spending_of(folder: Path, ledger: Ledger | None) -> Spending | None:
    """The account that a run was charged to, just after that charge; refuses an account that lacks it."""
    if ledger is None or ledger.receipt is None:
        return None
    account = PeopleAccount(read_json(folder / LOCAL)["account"])
    return account.read().upto(ledger.receipt, str(folder))


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
