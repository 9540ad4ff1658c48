"""A model is a function of recorded answers: it is made again from them with no data, to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.fit.run import resume, start
from dpformer.privacy import Answer, replay
from dpformer.privacy.replay import AnswerFiles, Replay, read_answers
from dpformer.statistics.histogram import Histogram
from dpformer.trust.verify.checks import NotChecked
from dpformer.trust.verify.own import rebuilt
from dpformer.trust.verify.run import embedded, make
from tests.recipes import small_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded(tmp_path_factory.mktemp("replay") / "data")


def test_other_answers_make_another_model(data: Path, tmp_path: Path) -> None:
    make("gru", tmp_path / "run")
    about, answers = read_answers(tmp_path / "run" / "answers")
    last = answers[-1]
    moved = {name: value + last.grid for name, value in last.values.items()}
    plan = start(tmp_path / "other", data, small_recipe()).plan
    AnswerFiles(tmp_path / "run" / "answers", **about).keep(
        len(answers) - 1, Answer(last.name, moved, last.noise_std, last.grid), plan
    )
    assert not rebuilt(tmp_path / "run").good


def test_a_resumed_run_has_all_its_answers(data: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", data, small_recipe())
    run.train(should_stop=lambda: run.step >= 3)
    run.trainer.make_step(run.curator)  # charged and forgotten: a crash
    run.close()
    resume(tmp_path / "run").train()
    assert rebuilt(tmp_path / "run").good


def test_a_recording_answers_only_what_it_has(data: Path, tmp_path: Path) -> None:
    histogram = Answer("histogram", {"histogram": np.arange(4) * 0.5}, 1.5, 0.5)
    asker = Replay([histogram])
    with pytest.raises(PrivacyError, match="histogram"):
        asker.ask(Histogram(40))
    assert asker.ask(Histogram(3)) is histogram
    with pytest.raises(PrivacyError, match="1 answers only"):
        asker.ask(Histogram(3))


def test_answers_that_are_too_large_are_not_kept_and_verify_says_so(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_BYTES", 100)
    start(tmp_path / "run", data, small_recipe()).train()
    assert len(read_answers(tmp_path / "run" / "answers")[1]) == 1
    with pytest.raises(NotChecked, match="too much room"):
        rebuilt(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "answers")
    with pytest.raises(NotChecked, match="no answers"):
        rebuilt(tmp_path / "run")


def test_a_damaged_recording_is_refused(data: Path, tmp_path: Path) -> None:
    make("transitions", tmp_path / "run")
    answers = tmp_path / "run" / "answers"
    (answers / "000001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DPFormerError, match="damaged"):
        read_answers(answers)
    (answers / "000001.safetensors").unlink()
    with pytest.raises(DPFormerError, match="missing"):
        read_answers(answers)


def test_a_run_without_privacy_keeps_none(data: Path, tmp_path: Path) -> None:
    start(tmp_path / "run", data, small_recipe(epsilon=float("inf"))).train()
    assert not (tmp_path / "run" / "answers").exists()
