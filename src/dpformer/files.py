"""Writing so that a crash at any moment leaves the old or the new, and never half of one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpformer.errors import DPFormerError

SMALL = 1 << 25
_BLOCK = 1 << 20


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write aside, sync, rename, sync the folder."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)  # left by a crash, perhaps with another mode
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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


def sha256(source: Path | bytes) -> str:
    """The SHA-256 of a file or of bytes, in hexadecimal."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    with readable(source):
        return sha256_of([source])


def read_small(path: Path) -> bytes:
    """A file that is some kilobytes by its nature. The folder may be a stranger's: what is no plain file, or huge, is refused."""
    with readable(path):
        if path.stat().st_size > SMALL:
            raise DPFormerError(
                f"{path}: has {path.stat().st_size:,} bytes, far more than dpformer writes; do not trust it"
            )
        return path.read_bytes()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A plain file that is there and can be read; a pipe would be waited for without end."""
    try:
        if not path.is_file():
            kind = "is no plain file" if path.exists() else "is missing"
            raise DPFormerError(f"{path}: {kind}; is this a run folder? (dpformer fit makes one)")
        yield
    except OSError as error:
        raise DPFormerError(f"{path}: cannot be read ({error.strerror}); mend its permissions") from None


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """One JSON document, written whole."""
    write_file(path, to_json(value), mode)


def to_json(value: Any) -> bytes:
    """A JSON document for people and machines."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """What `write_json` wrote; an error names the file."""
    try:
        return json.loads(read_small(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DPFormerError(f"{path}: cannot be read ({error}); it is damaged: copy the folder again") from None


def write_folder(path: Path, files: Iterable[tuple[str, bytes]], mode: int = 0o600) -> None:
    """A new folder of files, open to its owner only, put in place when it is whole and synced. mode: of the files in it."""
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(mode=0o700)
        for name, data in files:
            descriptor = os.open(aside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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


def sha256_of(files: Sequence[Path]) -> str:
    """The hash of one file; of several, the hash of their hashes, one a line, in the given order."""
    return sha256_joined([sha256_of_file(file) for file in files])


def sha256_joined(digests: Sequence[str]) -> str:
    """One hash for the hashes of one or several files."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The hash of one file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
