"""The run folder of a model of the caller's.

training.json       the settings; a run goes on with the same ones only     privacy.json    the privacy statement
ledger.jsonl, .head what was charged, before it was seen                    run.lock        keeps a second process out
model.safetensors   the trained parameters (average.safetensors: their average, if one was kept)
private/            state of an unfinished run; owner only, removed at the end
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dpformer import __version__
from dpformer.artifact import complete, is_written
from dpformer.artifact.layout import LOCK, MODEL, PRIVACY, PRIVATE, RELEASE, TRAINING
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.files import Lock, read_json, read_small, write_file, write_folder, write_json
from dpformer.privacy import Keys, PrivacyPlan, PrivacyStatement, create_ledger, parse_statement
from dpformer.privacy.account import PeopleAccount, RunCharge, receipts_beside
from dpformer.privacy.chain import Position
from dpformer.privacy.ledger import Ledger, open_ledger
from dpformer.training.checkpoint import Checkpoints, pack

FORMAT, START, AVERAGE = "dpformer-training", "start.safetensors", "average.safetensors"


class TrainingFolder:
    """A run folder, held against other processes. settings: what must be the same when the run goes on, ready for JSON."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, {"format": FORMAT, "version": 1, **settings}
        self._checkpoints = Checkpoints(path)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(path / LOCK)
        try:
            self.begun = (path / TRAINING).exists()
            if self.begun:
                self._compare()
            elif any(file.name != LOCK for file in path.iterdir()):
                raise DPFormerError(f"{path}: holds other files; choose a new folder with run=")
            if is_written(path):
                complete(path)
        except BaseException:
            self._lock.close()
            raise

    def _compare(self) -> None:
        stored = read_json(self.path / TRAINING)
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise DPFormerError(
                f"{self.path / TRAINING}: was not written by dpformer, or is damaged; choose another run="
            )
        for name in {**stored, **self.settings}:
            before, now = stored.get(name), self.settings.get(name)
            if before != now and name != "dpformer":
                raise PrivacyError(
                    f"{self.path}: this run began with {name} {_short(before)}, not {_short(now)}; give it as it was, or begin "
                    "another run in a folder of its own, which spends a budget of its own"
                )

    @property
    def finished(self) -> bool:
        """Is the model released?"""
        return (self.path / MODEL).exists() and not (self.path / PRIVATE).exists()

    def begin(self, plan: PrivacyPlan, start: dict[str, Tensor], account: PeopleAccount | None) -> Ledger | None:
        """Charge the account of people, start the ledger of a new run, and keep the weights that it starts from."""
        run_id, receipt = secrets.token_hex(16), None
        if account is not None:
            receipt = account.charge(RunCharge.of(run_id, self.path.name, plan), receipts_beside(self.path))
        ledger = create_ledger(self.path, plan, run_id, receipt) if plan.private else None
        self._checkpoints.make_folder()
        write_file(self.path / PRIVATE / START, pack(start), 0o600)
        return ledger

    def save(self, keys: Keys, ledger: Ledger | None, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Save a checkpoint; the first makes the run one that can go on."""
        place = None
        if ledger is not None:
            position = ledger.position()
            place = {"run_id": ledger.run_id, "entries": position.entries, "hash": position.hash}
        self._checkpoints.save(tensors, {**values, "keys": keys.state(), "ledger": place})
        if not self.begun:
            write_json(self.path / TRAINING, {**self.settings, "dpformer": __version__})
            self.begun = True

    def reopen(self) -> tuple[Keys, Ledger | None, dict[str, Tensor], dict[str, Any]]:
        """Keys, ledger, tensors and values of the last checkpoint."""
        tensors, values = self._checkpoints.load()
        place, ledger = values["ledger"], None
        if place is not None:
            ledger = open_ledger(self.path, Position(place["entries"], place["hash"]), place["run_id"])
        return Keys.restored(values["keys"]), ledger, tensors, values

    def distances(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, float, float]]:
        """Of each parameter: its name, how far it is from the start, and its norm at the start."""
        with safe_open(self.path / PRIVATE / START, framework="pt") as start:
            for name, value in weights.items():
                before = start.get_tensor(name)
                yield name, float(torch.dist(value.detach().cpu(), before)), float(before.norm())

    def release(self, files: dict[str, dict[str, Tensor]], statement: PrivacyStatement) -> None:
        """Write what is released, remove the secrets, then put it in place; see `artifact.write`."""
        tensors = ((name, pack(value)) for name, value in files.items())
        write_folder(self.path / PRIVATE / RELEASE, [(PRIVACY, statement.to_json().encode()), *tensors], mode=0o644)
        complete(self.path)

    def released(self, name: str) -> dict[str, Tensor]:
        """The parameters of a finished run."""
        return load_file(self.path / name)

    def statement(self) -> PrivacyStatement:
        """The statement of a finished run."""
        return parse_statement(read_small(self.path / PRIVACY))

    def close(self) -> None:
        """Let another process open the run."""
        self._lock.close()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]} ..."
