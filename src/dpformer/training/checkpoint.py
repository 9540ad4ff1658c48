"""The private state of a run that is not finished: what the next steps depend on, readable by its owner only.

It holds the noise and the sample to come, so a reader of it can undo the privacy of the coming steps. It lives in `private/`,
apart from what is released, and is removed when the run ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from dpformer.artifact.layout import CHECKPOINT, PRIVATE
from dpformer.artifact.read import has_checkpoint
from dpformer.errors import DPFormerError
from dpformer.files import read_json, sha256, to_json, write_folder

STATE, VALUES, SUMS = "state.safetensors", "state.json", "sha256.json"


def pack(tensors: dict[str, Tensor]) -> bytes:
    """Tensors as the bytes of a safetensors file."""
    return to_safetensors({name: value.contiguous().cpu() for name, value in tensors.items()})


class Checkpoints:
    """The checkpoints of a run, numbered; the newest counts, older ones are removed when it is in place."""

    def __init__(self, run: Path) -> None:
        self.folder = run / PRIVATE

    def make_folder(self) -> None:
        """`private/`, for its owner only."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        os.chmod(self.folder, 0o700)

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Write a state, whole or not at all."""
        older = self._all()
        number = int(older[-1].name.removeprefix(CHECKPOINT)) + 1 if older else 1
        write_folder(self.folder / f"{CHECKPOINT}{number:08d}", self._files(tensors, values))
        for old in older:
            shutil.rmtree(old, ignore_errors=True)  # what is left of it goes with the next one

    def _files(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        sums = {}
        for name, data in ((STATE, pack(tensors)), (VALUES, to_json(values))):
            sums[name] = sha256(data)
            yield name, data
        yield SUMS, to_json(sums)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest state."""
        newest = self._newest()
        try:
            sums = read_json(newest / SUMS)
            if not isinstance(sums, dict) or not {STATE, VALUES} <= sums.keys():
                raise _damaged(newest, f"{SUMS} is not what was written")
            if any(sha256(newest / name) != sums[name] for name in (STATE, VALUES)):
                raise _damaged(newest, "sha256 differs")
            return load_file(newest / STATE), read_json(newest / VALUES)
        except (OSError, SafetensorError) as error:
            raise _damaged(newest, str(error)) from None

    def _newest(self) -> Path:
        checkpoints = self._all()
        if not checkpoints:
            raise DPFormerError(
                f"{self.folder}: holds no checkpoint: the run never began, or its state was deleted; fit again in another folder"
            )
        return checkpoints[-1]

    def any_left(self) -> bool:
        """Is there any checkpoint, whole or half written? It holds the keys of the noise."""
        return has_checkpoint(self.folder.parent)

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob(f"{CHECKPOINT}*"))


def _damaged(checkpoint: Path, reason: str) -> DPFormerError:
    return DPFormerError(
        f"{checkpoint}: cannot be read ({reason}); it is damaged: put back a copy of the whole run folder, or fit again in "
        "another folder. What was spent stays in the ledger"
    )
