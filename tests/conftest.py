"""What the tests share: the command line in this process, and data sets that may not be redistributed."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from dpformer.cli import main
from dpformer.data.named import AMAZON_GAMES, ML_1M, NamedSet, cache_folder

# The same examples in every run of CI, new ones on a developer's machine. No deadlines: a loaded machine is slow, not wrong.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def dpformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line, run in this process: `dpformer("prepare", ...)`."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["dpformer", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors are float64 unless said otherwise, from a fixed seed."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def find_set(named: NamedSet, variable: str) -> Path:
    """The file of a data set that may not be redistributed; skips the test where it is not at hand."""
    given = os.environ.get(variable)
    path = Path(given) if given else cache_folder() / named.name / named.file
    if path.is_dir():
        path = path / named.file
    if not path.is_file():
        pytest.skip(f"needs {named.file} of {named.name}: set {variable} or run `dpformer prepare {named.name} -o DIR`")
    return path


@pytest.fixture
def ml_1m() -> Path:
    return find_set(ML_1M, "DPFORMER_ML_1M")


@pytest.fixture
def video_txt() -> Path:
    return find_set(AMAZON_GAMES, "DPFORMER_AMAZON_GAMES")
