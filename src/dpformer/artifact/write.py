"""How a run ends, so that no readable folder ever holds secrets beside the model.

1. The release is written aside, whole and synced: `private/release/`.
2. The checkpoints, which hold the keys of the noise, are unlinked, and the folder is synced.
3. The files of the release are renamed into place, the model last; `private/` is removed.

A crash before 2 resumes the run or its end. After 2 there is no secret left, and `resume` only renames. So a folder that has the
model has no secrets and is whole. `refuse_unfinished` refuses any other, for everything that opens a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from dpformer.errors import DPFormerError
from dpformer.files import sync_folder, write_folder
from dpformer.fit.checkpoint import PRIVATE, Checkpoints

RELEASE = "release"
MODEL = "model.safetensors"


def publish(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """End a run with these files, the model among them."""
    write_folder(folder / PRIVATE / RELEASE, files, mode=0o644)
    complete(folder)


def is_written(folder: Path) -> bool:
    """Is the release written, so that nothing is left to do but its end?"""
    return (folder / PRIVATE / RELEASE).is_dir() or ((folder / MODEL).exists() and (folder / PRIVATE).is_dir())


def complete(folder: Path) -> None:
    """Unlink all secrets, then put the release in place. It may be called again after a crash at any point of it."""
    private = folder / PRIVATE
    release = private / RELEASE
    try:
        for path in sorted(private.iterdir()):
            if path.name != RELEASE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync_folder(private)
        if release.is_dir():
            for name in sorted((path.name for path in release.iterdir()), key=lambda name: name == MODEL):
                os.replace(release / name, folder / name)
                sync_folder(folder)  # before the next one: the model must be last on the disk too
            release.rmdir()
        private.rmdir()
        sync_folder(folder)
    except OSError as error:
        raise DPFormerError(
            f"{private}: the end of the run could not be written ({error.strerror}); mend that, then: dpformer resume {folder}"
        ) from None


def refuse_unfinished(folder: Path) -> None:
    """Refuse a folder whose run has not ended, or that holds secret state: with it anybody can subtract the noise."""
    cure = f"finish it with: dpformer resume {folder}"
    if Checkpoints(folder).any_left():
        beside = "beside the model" if (folder / MODEL).exists() else "and no released model yet"
        raise DPFormerError(
            f"{folder}: holds secret state of its run ({PRIVATE}/, keys of the noise) {beside}, so it is not opened; {cure}"
        )
    if (folder / PRIVATE).exists() or not (folder / MODEL).is_file():
        raise DPFormerError(f"{folder}: holds no released model yet; {cure}")
