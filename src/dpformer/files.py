"""Write files so that a crash leaves the old or the new one, never half of one; locks; hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from dpformer.errors import DPFormerError, PrivacyError

SMALL = 1 << 25


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write aside, sync, rename, sync the folder."""
    with _writable(path):
        replace_file(path, data, mode)
        sync_folder(path.parent)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{path}: cannot be written ({error.strerror}); what was saved before is untouched"
        raise DPFormerError(message) from None


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write aside, sync, rename. Until the folder is synced, a crash may bring back the old file. Raises `OSError`."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)  # left by a crash, perhaps with another mode
        _write_new(aside, data, mode)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_synced(descriptor: int, data: bytes) -> None:
    """Write all of the data and sync the file."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        write_synced(file.fileno(), data)


class Lock:
    """A lock on a file against other processes and other locks of this process, until it is closed or the process ends.

    The system's own locks only (`flock`, or Windows'), which end with the process. The file stays: deleting it would let a
    third process lock a new file of the same name. patience: seconds to wait for another process.
    """

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        self._lock = FileLock(path, timeout=patience, mode=0o644, thread_local=False, fallback_to_soft=False)
        try:
            if isinstance(self._lock, SoftFileLock):
                raise PrivacyError(f"{path}: this system has no file locks; run dpformer on another one")
            self._lock.acquire()
        except Timeout:
            raise PrivacyError(
                f"{path.parent} is in use by another process; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise PrivacyError(
                f"{path}: cannot be locked ({error.strerror}); mend the folder's permissions, or take a disk that has locks"
            ) from None

    def close(self) -> None:
        """Let another process take the lock. A second call does nothing."""
        self._lock.release()


def sha256(source: Path | bytes) -> str:
    """The SHA-256 of a file or of bytes, in hexadecimal."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    with readable(source):
        return sha256_of([source])


def read_small(path: Path, most: int = SMALL) -> bytes:
    """A file that is small by its nature. The folder may be a stranger's: what is no plain file, or huge, is refused."""
    with readable(path):
        if path.stat().st_size > most:
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
    with _writable(path):
        try:
            aside.mkdir(mode=0o700)
            for name, data in files:
                _write_new(aside / name, data, mode)
            sync_folder(aside)
            os.rename(aside, path)
            sync_folder(path.parent)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last. Windows has no such call for folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(files: Sequence[Path]) -> str:
    """The hash of one file; of several, the hash of their hashes, one a line, in the given order."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else sha256("".join(f"{digest}\n" for digest in digests).encode())
