"""Text files, plain or gzipped: numbered lines, and the start of a file to detect its format."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal, cast

from dpformer.errors import DataError

SAMPLE_BYTES = 1 << 16
_BAD_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file; gzip is detected by the first two bytes."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines with numbers from 1. Raises `DataError` for damaged gzip and text that is not UTF-8."""
    number = 0
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, number, error) from None
    except _BAD_GZIP:
        raise _broken_gzip(path, number) from None


def sample(path: Path) -> str:
    """Read the start of a text file: complete lines, without byte order mark."""
    try:
        with open_bytes(path) as file:
            head = file.read(SAMPLE_BYTES)
    except _BAD_GZIP:
        raise _broken_gzip(path, 0) from None
    if head.startswith(b"PK\x03\x04"):
        raise DataError(f"{path}: is a zip archive; unzip it and give the file inside")
    if len(head) == SAMPLE_BYTES:
        head = head[: head.rfind(b"\n") + 1] or head
    if b"\x00" in head:
        raise DataError(f"{path}: is neither text (UTF-8), gzip nor Parquet; export it as CSV, JSON lines or Parquet")
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, head[: error.start].count(b"\n") + 1, error) from None
    if not text.strip():
        raise DataError(f"{path}: is empty; give a log with at least the columns user_id and item_id")
    return text


def first_line_of(text: str) -> str:
    """The first line that is not blank. Lines end with a line feed only; `splitlines` splits at more."""
    return next(line for line in text.split("\n") if line.strip()).removesuffix("\r")


def rows_of(text: str, separator: str, quoted: bool = True) -> list[list[str]]:
    """Split a sample into rows that are not empty."""
    # For polars only a line feed ends a line; the csv module fails at a single carriage return.
    return [row for row in csv_rows(io.StringIO(re.sub("\r(?!\n)", " ", text)), separator, quoted) if row]


def csv_rows(lines: Iterable[str], separator: str, quoted: bool, strict: bool = False) -> Iterator[list[str]]:
    """Split lines into rows of fields; `strict` raises `csv.Error` for unbalanced quotes."""
    if separator == "::":
        return (line.rstrip("\r\n").split("::") for line in lines if line.strip("\r\n"))
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    return csv.reader(lines, delimiter=separator, quoting=quoting, strict=strict)


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    byte, cure = error.object[error.start], "convert it first: iconv -f latin1 -t utf-8 OLD > NEW"
    return DataError(f"{path}: line {line} is not UTF-8 (byte 0x{byte:02x}); {cure}")


def _broken_gzip(path: Path, line: int) -> DataError:
    return DataError(f"{path}: the gzip data is damaged or ends after line {line}; copy or download it again")
