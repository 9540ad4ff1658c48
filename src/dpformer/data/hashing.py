"""SHA-256 of files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

_BLOCK = 1 << 20


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
