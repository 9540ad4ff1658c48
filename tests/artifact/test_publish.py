"""The end of a run: secrets go before the model comes, and the model is the last file in place, whatever call fails."""

import os
from pathlib import Path

import pytest

from dpformer.artifact import complete
from dpformer.artifact.layout import FILES, ITEMS, MODEL, PRIVACY, PRIVATE, RELEASE, SPEC
from dpformer.artifact.write import is_written
from dpformer.errors import DPFormerError

OTHERS = (FILES, ITEMS, PRIVACY, SPEC, "z.json")  # before and behind the model in any order of names
SECRET = "checkpoint-000001"


@pytest.fixture
def ended(tmp_path) -> Path:
    release = tmp_path / PRIVATE / RELEASE
    release.mkdir(parents=True)
    for name in (*OTHERS, MODEL):
        (release / name).write_text(name)
    (tmp_path / PRIVATE / SECRET).mkdir()
    (tmp_path / PRIVATE / SECRET / "keys.json").write_text("secret")
    return tmp_path


@pytest.mark.parametrize("failing", range(len(OTHERS) + 1))
def test_the_model_is_in_place_only_when_all_else_is(ended, failing, monkeypatch):
    real, calls = os.replace, iter(range(100))

    def fails(source: Path, target: Path) -> None:
        if next(calls) == failing:
            raise OSError(5, "Input/output error")
        assert not (ended / PRIVATE / SECRET).exists(), "a file is published while the keys are there"
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(DPFormerError, match="dpformer resume"):
            complete(ended)
    assert not (ended / MODEL).exists()
    assert sum((ended / name).exists() for name in OTHERS) == failing
    assert is_written(ended)
    complete(ended)
    assert {path.name for path in ended.iterdir()} == {*OTHERS, MODEL}
