"""The file format of a run's ledger and of the account of people: JSON lines, each with the hash of the line before.

`ledger.jsonl` is the chain, `ledger.head` the number and hash of the last synced line, `ledger.lock` keeps a second writer out.
`append` returns after its line is written and synced, so nothing was released for a torn last line (without its line end),
which is dropped.

Detected: a line that was edited, removed, inserted, moved or copied from another chain; an end cut off behind the head or
behind a `Position` that the caller remembers. Not detected: chain, head and all remembered positions replaced by older or
forged ones.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.files import Lock, read_small, replace_file, sha256, sync_folder, write_synced

CHAIN, HEAD, LOCK = "ledger.jsonl", "ledger.head", "ledger.lock"
# A million steps, the most that a plan may have, take half of it.
_MOST_BYTES = 1 << 29

Line = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """How far a chain has come: the number of lines after the header, and the hash of the last line."""

    entries: int
    hash: str


class Chain:
    """An open chain, locked against a second writer."""

    def __init__(self, folder: Path, lock: Lock, file: int, position: Position) -> None:
        self._folder, self._lock, self._file = folder, lock, file
        self.position = position
        self._writable, self._process = True, os.getpid()

    def append(self, fields: Line) -> None:
        """Write and sync one line. After this has returned, the line survives any crash."""
        if not self._writable:
            raise PrivacyError(f"{self._folder / CHAIN} could not be written, or was closed; resume the run")
        if os.getpid() != self._process:  # else a fork and its parent would both write the next line
            raise PrivacyError(f"this process is a fork of the one that opened {self._folder / CHAIN}; charge there")
        number = self.position.entries + 1
        line, digest = _line({**fields, "n": number, "previous": self.position.hash})
        self._writable = False  # until the line is synced
        with _explained(self._folder):
            write_synced(self._file, line)
            _write_head(self._folder, Position(number, digest))
        self._writable = True
        self.position = Position(number, digest)

    def close(self) -> None:
        """Let another process open the chain."""
        if self._file >= 0:
            os.close(self._file)
            self._lock.close()
            self._file, self._writable = -1, False


def create_chain(folder: Path, header: Line) -> Chain:
    """Start a chain. A folder that already has one is refused: its spending would be forgotten."""
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock:
        for name in (CHAIN, HEAD):
            if (folder / name).exists():
                raise PrivacyError(f"{folder / name} exists: resume that run, or choose another run folder")
        line, digest = _line({**header, "previous": ""})
        file = os.open(folder / CHAIN, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        write_synced(file, line)
        _write_head(folder, Position(0, digest))
        sync_folder(folder)
        return Chain(folder, lock, file, Position(0, digest))


def open_chain(
    folder: Path, parse: Callable[[list[Line]], T], expected: Position | None = None, patience: float = 0.0
) -> tuple[Chain, T]:
    """Check a whole chain and continue it; also returns its lines, the header first, as `parse` reads them.

    patience: see `Lock`.
    """
    if not (folder / CHAIN).exists():
        raise _missing(folder)
    with _locked(folder, patience) as lock:
        lines, length = _read(folder, expected)
        position, parsed = Position(len(lines) - 1, lines[-1]["hash"]), parse(lines)
        file = os.open(folder / CHAIN, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(file, length)
        write_synced(file, b"")
        _write_head(folder, position)
        return Chain(folder, lock, file, position), parsed


def read_chain(folder: Path, expected: Position | None = None) -> list[Line]:
    """Check a whole chain without the right to write it; the header comes first."""
    return _read(folder, expected)[0]


def _line(fields: Line) -> tuple[bytes, str]:
    """The fields as one line that ends with the hash of all of them; and that hash."""
    text = _canonical(fields)
    digest = sha256(text)
    return text[:-1] + f',"hash":"{digest}"}}\n'.encode(), digest


def _canonical(fields: Line) -> bytes:
    """The one way in which fields become bytes: sorted keys, no spaces, ASCII, floats by their exact repr."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _read(folder: Path, expected: Position | None) -> tuple[list[Line], int]:
    """The lines, and the length of the sound part in bytes. Raises on any flaw but a torn last line."""
    path = folder / CHAIN
    # The head first: another process may be writing, and the chain is always ahead of the head.
    remembered = [position for position in (_read_head(folder), expected) if position]
    if not path.exists():
        raise _missing(folder)
    data = read_small(path, _MOST_BYTES)
    length = data.rfind(b"\n") + 1
    lines: list[Line] = []
    for number, raw in enumerate(data[:length].split(b"\n")[:-1]):
        lines.append(_checked(raw, number, lines[-1]["hash"] if lines else "", path))
    if not lines:
        raise PrivacyError(f"{path} has no header: the run never began; delete its folder and start again")
    if len(lines) > 1 and not (folder / HEAD).exists():
        raise PrivacyError(f"{folder / HEAD} is missing: the ledger's end cannot be checked; do not trust it")
    for position in remembered:
        if position.entries >= len(lines):
            counts = f"{len(lines) - 1} entries where {position.entries} were written"
            raise PrivacyError(f"{path} has {counts}: its end was cut off; do not resume or publish this run")
        if lines[position.entries]["hash"] != position.hash:
            raise PrivacyError(f"{path} is not this run's ledger: entry {position.entries} differs; it was copied")
    return lines, length


def _checked(raw: bytes, number: int, previous: str, path: Path) -> Line:
    try:
        fields = json.loads(raw)
        digest = fields.pop("hash")
        sound = _line(fields) == (raw + b"\n", digest) and fields["previous"] == previous
        sound = sound and (number == 0 or fields["n"] == number)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise PrivacyError(f"{path} line {number + 1} was changed, moved or copied from elsewhere; do not trust it")
    return {**fields, "hash": digest}


def _write_head(folder: Path, position: Position) -> None:
    """Replace the head atomically. After a crash it may be behind the chain; it is never ahead of it."""
    replace_file(folder / HEAD, _canonical(asdict(position)))


def _read_head(folder: Path) -> Position | None:
    """The head; None only where a crash may have left none, which `_read` checks."""
    if not (folder / HEAD).exists():
        return None
    try:
        head = json.loads(read_small(folder / HEAD))
        return Position(int(head["entries"]), str(head["hash"]))
    except (ValueError, KeyError, TypeError, RecursionError, DPFormerError):
        raise PrivacyError(f"{folder / HEAD} is damaged: the ledger's end cannot be checked; do not trust it") from None


@contextlib.contextmanager
def _locked(folder: Path, patience: float = 0.0) -> Iterator[Lock]:
    """The lock of a chain's folder, released if an error follows."""
    lock = Lock(folder / LOCK, patience)
    try:
        with _explained(folder):
            yield lock
    except BaseException:
        lock.close()
        raise


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one with a cure."""
    try:
        yield
    except OSError as failure:
        message = f"{folder / CHAIN} cannot be written ({failure.strerror}); nothing was released"
        raise PrivacyError(f"{message}. Free space or mend the folder's permissions, then resume") from failure


def _missing(folder: Path) -> PrivacyError:
    return PrivacyError(f"{folder / CHAIN} is missing: what this run has spent is not recorded; start a new run")
