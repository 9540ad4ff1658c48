"""`RunFolder`: the lock, the ledger, the checkpoints and the end of an open run, of `fit` and of `PrivateTraining`.

A checkpoint holds the noise and the sample to come, so a reader of it can undo the privacy of the coming steps. Checkpoints live
in `private/`, for its owner only, and are removed when the run ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from dpformer.artifact.layout import CHECKPOINT, LOCK, PRIVATE
from dpformer.errors import DPFormerError
from dpformer.files import Lock, read_json, sha256, to_json, write_file, write_folder
from dpformer.privacy import Curator, Keys, PrivacyPlan, PrivacyStatement, create_ledger
from dpformer.privacy.account import PeopleAccount, RunCharge, Spending, receipts_beside
from dpformer.privacy.build import Circumstances, build_statement
from dpformer.privacy.chain import Position
from dpformer.privacy.ledger import Ledger, open_ledger
from dpformer.privacy.statement import TuningPart

STATE, VALUES, SUMS = "state.safetensors", "state.json", "sha256.json"


def pack(tensors: dict[str, Tensor]) -> bytes:
    """Tensors as the bytes of a safetensors file."""
    return to_safetensors({name: value.contiguous().cpu() for name, value in tensors.items()})


class RunFolder:
    """A run folder, held against other processes: two of them would mix their settings and their checkpoints.

    ledger: None until the run is begun or reopened, and for a plan with epsilon inf.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.private = path, path / PRIVATE
        self.ledger: Ledger | None = None
        self._lock = Lock(path / LOCK)

    def begin(self, plan: PrivacyPlan, account: PeopleAccount | None, settings: tuple[str, bytes]) -> None:
        """Charge the account of people, then write the settings (a file's name and content), the ledger and `private/`."""
        run_id, receipt = secrets.token_hex(16), None
        if account is not None:
            receipt = account.charge(RunCharge.of(run_id, self.path.name, plan), receipts_beside(self.path))
        write_file(self.path / settings[0], settings[1])
        self.ledger = create_ledger(self.path, plan, run_id, receipt) if plan.private else None
        self.private.mkdir(mode=0o700, exist_ok=True)
        os.chmod(self.private, 0o700)

    def save(self, keys: Keys, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Save a checkpoint, whole or not at all, with the keys and the place in the ledger; older ones are removed then."""
        place = None
        if self.ledger is not None:
            position = self.ledger.position()
            place = {"run_id": self.ledger.run_id, "entries": position.entries, "hash": position.hash}
        older = self._checkpoints()
        number = int(older[-1].name.removeprefix(CHECKPOINT)) + 1 if older else 1
        files = _files(tensors, {**values, "keys": keys.state(), "ledger": place})
        write_folder(self.private / f"{CHECKPOINT}{number:08d}", files)
        for old in older:
            shutil.rmtree(old, ignore_errors=True)  # what is left of it goes with the next one

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and values of the newest checkpoint."""
        checkpoints = self._checkpoints()
        if not checkpoints:
            raise DPFormerError(
                f"{self.private}: holds no checkpoint: the run never began, or its state was deleted; fit again in another folder"
            )
        newest = checkpoints[-1]
        try:
            sums = read_json(newest / SUMS)
            if not isinstance(sums, dict) or not {STATE, VALUES} <= sums.keys():
                raise _damaged(newest, f"{SUMS} is not what was written")
            if any(sha256(newest / name) != sums[name] for name in (STATE, VALUES)):
                raise _damaged(newest, "sha256 differs")
            return load_file(newest / STATE), read_json(newest / VALUES)
        except (OSError, SafetensorError) as error:
            raise _damaged(newest, str(error)) from None

    def _checkpoints(self) -> list[Path]:
        return sorted(self.private.glob(f"{CHECKPOINT}*"))

    def reopen_ledger(self, values: dict[str, Any]) -> Keys:
        """Open the ledger where a checkpoint left it; returns the keys of the checkpoint."""
        if (place := values["ledger"]) is not None:
            self.ledger = open_ledger(self.path, Position(place["entries"], place["hash"]), place["run_id"])
        return Keys.restored(values["keys"])

    def spending(self, account: PeopleAccount | None) -> Spending | None:
        """The account that the run was charged to, just after that charge; refuses an account that lacks it."""
        if account is None or self.ledger is None or self.ledger.receipt is None:
            return None
        return account.read().upto(self.ledger.receipt, str(self.path))

    def close(self) -> None:
        """Let another process open the run."""
        if self.ledger is not None:
            self.ledger.close()
        self._lock.close()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the folder if what follows fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def state_privacy(
    curator: Curator[Any], about: Circumstances, tuning: TuningPart, account: Spending | None
) -> PrivacyStatement:
    """The privacy statement of a run, from what its ledger says was charged."""
    charged = None if curator.ledger is None else curator.ledger.account()
    return build_statement(curator.plan, charged, replace(about, seeded=curator.keys.seeded, account=account), tuning)


def _files(tensors: dict[str, Tensor], values: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    sums = {}
    for name, data in ((STATE, pack(tensors)), (VALUES, to_json(values))):
        sums[name] = sha256(data)
        yield name, data
    yield SUMS, to_json(sums)


def _damaged(checkpoint: Path, reason: str) -> DPFormerError:
    return DPFormerError(
        f"{checkpoint}: cannot be read ({reason}); it is damaged: put back a copy of the whole run folder, or fit again in "
        "another folder. What was spent stays in the ledger"
    )
