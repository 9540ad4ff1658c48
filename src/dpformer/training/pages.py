"""How large a Parquet file is when it is unpacked, read from its headers alone.

A page says its unpacked size in a header of its own, and a reader takes that much memory for it. A few kilobytes can so ask for
gigabytes. The footer has sums, but a forger writes them as he likes; so the pages are walked, one header after the other.

Headers are Thrift structures in the compact protocol: for each field a byte with type and the step to its number, then the value.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, Any

# Numbers of the fields that are used, of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData and PageHeader.
ROW_GROUPS, COLUMNS, META_DATA = 4, 1, 3
PACKED_TOTAL, DATA_PAGE, DICTIONARY_PAGE = 7, 9, 11
PAGE_UNPACKED, PAGE_PACKED = 2, 3
PAGE_KINDS, PAGE_VALUES = (5, 7, 8), 1  # data, dictionary, data of version 2
FOOTER_BYTES, HEADER_BYTES, PAGES = 1 << 22, 1 << 16, 1 << 16


class PageError(ValueError):
    """The headers are not those of a Parquet file."""


def unpacked(path: Path) -> tuple[int, int]:
    """Bytes of all pages of a Parquet file, unpacked, and the number of their values: a repeated one takes hardly a byte."""
    try:
        with path.open("rb") as file:
            return _walk(file, path.stat().st_size)
    except (IndexError, KeyError, TypeError, struct.error, RecursionError, AttributeError) as error:
        raise PageError(f"its headers are damaged ({type(error).__name__})") from None


def _walk(file: IO[bytes], length: int) -> tuple[int, int]:
    file.seek(max(0, length - 8))
    tail = file.read(8)
    size = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or size > min(length - 8, FOOTER_BYTES):
        raise PageError("its footer is damaged or too large")
    file.seek(length - 8 - size)
    footer = Compact(file.read(size)).structure()
    total = values = pages = 0
    for group in footer.get(ROW_GROUPS, []):
        for column in group[COLUMNS]:
            about = column[META_DATA]
            start = min(place for place in (about[DATA_PAGE], about.get(DICTIONARY_PAGE)) if place)
            end = start + about[PACKED_TOTAL]
            while start < end:
                file.seek(start)
                reader = Compact(file.read(HEADER_BYTES))
                header = reader.structure()
                unpacked, packed = header[PAGE_UNPACKED], header[PAGE_PACKED]
                pages += 1
                if unpacked < 0 or packed < 0 or pages > PAGES:
                    raise PageError("its pages are damaged or too many")
                total += unpacked
                values += sum(header[kind][PAGE_VALUES] for kind in PAGE_KINDS if kind in header)
                start += reader.place + packed
    return total, values


class Compact:
    """Reads a Thrift structure as `{number of field: value}`."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def structure(self) -> dict[int, Any]:
        """Fields until the stop byte."""
        found: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._integer()
            found[number] = self._value(kind & 15, in_field=True)
        return found

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise PageError("a number in its headers is too long")
        return value | byte << shift

    def _integer(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def _value(self, kind: int, in_field: bool = False) -> Any:
        if kind in (1, 2):  # true and false; a byte of their own in lists only
            return kind == 1 if in_field else self._byte() == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            self.place += 8
            return None
        if kind == 8:
            return self._skip(self._unsigned())
        if kind in (9, 10):
            head = self._byte()
            count = self._unsigned() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15) for _ in range(self._possible(count))]
        if kind == 11:
            count = self._possible(self._unsigned())
            kinds = self._byte() if count else 0
            return [(self._value(kinds >> 4), self._value(kinds & 15)) for _ in range(count)]
        if kind == 12:
            return self.structure()
        raise PageError(f"its headers hold an unknown type {kind}")

    def _possible(self, count: int) -> int:
        """A list cannot have more values than there are bytes left."""
        if count > len(self.data) - self.place:
            raise PageError("a list in its headers is longer than the headers")
        return count

    def _skip(self, count: int) -> None:
        self.place += self._possible(count)
