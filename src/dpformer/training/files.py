"""Writing so that a crash at any moment leaves the old or the new, and never half of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpformer.errors import DPFormerError


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write aside, sync, rename, sync the folder."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise DPFormerError(
            f"{path}: cannot be written ({error.strerror}); what was saved before is untouched"
        ) from None


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """One JSON document, written whole."""
    write_file(path, to_json(value), mode)


def to_json(value: Any) -> bytes:
    """A JSON document for people and machines."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """What `write_json` wrote; an error names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DPFormerError(f"{path}: is missing; is this a run folder? (dpformer fit makes one)") from None
    except (OSError, ValueError) as error:
        raise DPFormerError(f"{path}: cannot be read ({error}); it is damaged") from None


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """A new folder of files, readable by its owner only, put in place when it is whole and synced."""
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(mode=0o700)
        for name, data in files.items():
            descriptor = os.open(aside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(aside)
        os.rename(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DPFormerError(
            f"{path}: cannot be written ({error.strerror}); what was saved before is untouched"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
