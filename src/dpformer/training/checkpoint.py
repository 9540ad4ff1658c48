"""The private state of a run that is not finished: what the next steps depend on, readable by its owner only.

It holds the noise and the sample to come, so whoever has it can undo the privacy of the coming steps. It lives in `private/`,
apart from what is released, and is removed when the run ends.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpformer.errors import DPFormerError
from dpformer.training.files import read_json, write_folder, write_json

PRIVATE = "private"


class Checkpoints:
    """The checkpoints of a run; the newest sound one counts, older ones are removed when it is in place."""

    def __init__(self, run: Path) -> None:
        self.folder = run / PRIVATE

    def make_folder(self) -> None:
        """`private/`, for its owner only."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        os.chmod(self.folder, 0o700)

    def save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Write the state after a step, whole or not at all."""

        def write(aside: Path) -> None:
            save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, aside / "state.safetensors")
            write_json(aside / "state.json", values, mode=0o600)

        place = self.folder / f"step-{step:08d}"
        if place.exists():
            shutil.rmtree(place)
        write_folder(place, write)
        for old in self._all():
            if old != place:
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest state."""
        found = self._all()
        if not found:
            raise DPFormerError(
                f"{self.folder}: holds no checkpoint: the run is finished, or never began; start a new one with fit"
            )
        try:
            return load_file(found[-1] / "state.safetensors"), read_json(found[-1] / "state.json")
        except (OSError, SafetensorError) as error:
            raise DPFormerError(
                f"{found[-1]}: cannot be read ({error}); it is damaged, and the run cannot go on"
            ) from None

    def remove(self) -> None:
        """Delete all private state: the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*")) if self.folder.is_dir() else []
