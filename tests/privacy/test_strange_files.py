"""Ledgers, accounts and recorded answers may come from a stranger: nothing is waited for, trusted or read without a bound."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.privacy import Answer, create_ledger, make_plan, read_ledger
from dpformer.privacy.account import Cap, PeopleAccount, Receipt, RunCharge, receipts_beside
from dpformer.privacy.chain import CHAIN, HEAD
from dpformer.privacy.ledger import open_ledger
from dpformer.privacy.plan import plan_to_json
from dpformer.privacy.replay import AnswerFiles, Replay, read_answers
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from tests.asking import charge
from tests.privacy.test_ledger import forged

PLAN = make_plan(20, 6.0, 1e-2, shares={HISTOGRAM: 1.0})
GRID = 2.0**-26


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """An open pipe is waited for without end; here for some seconds."""

    def waited(*_: object) -> None:
        raise TimeoutError("a pipe was waited for")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def ledger(tmp_path) -> Path:
    with create_ledger(tmp_path / "run", PLAN) as made:
        charge(made, 0)
    return tmp_path / "run"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    """64 GB that take no room on disk."""
    os.truncate(path, 1 << 36)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000 + b"\n")


@pytest.mark.parametrize("make", [pipe, device, sparse, deep])
@pytest.mark.parametrize("name", [CHAIN, HEAD])
def test_a_ledger_that_is_no_small_file_is_refused(ledger, name, make):
    make(ledger / name)
    for read in (read_ledger, open_ledger):
        with pytest.raises(DPFormerError):
            read(ledger)


@pytest.mark.parametrize("make", [pipe, device, deep])
def test_a_strange_ledger_beside_a_run_stops_no_charge(ledger, make):
    make(ledger / CHAIN)
    assert receipts_beside(ledger.parent / "next") == []


@pytest.mark.parametrize(
    "receipt",
    [
        {"account": "a", "entries": 0, "hash": "h"},
        {"account": "a", "entries": "1", "hash": "h"},
        [],
        None,
        {"entries": 1},
    ],
)
def test_a_receipt_that_is_none_is_refused_and_not_counted(tmp_path, receipt):
    account = PeopleAccount.create(tmp_path / "people", Cap(8, 1e-2))
    if isinstance(receipt, dict):
        receipt["account"] = account.read().id
    header = {"ledger": 2, "run_id": "r", "plan": plan_to_json(PLAN), "receipt": receipt}
    forged(tmp_path / "run", header, {"name": HISTOGRAM, "tag": "0"})
    with pytest.raises(PrivacyError, match="dpformer did not write it"):
        read_ledger(tmp_path / "run")
    assert receipts_beside(tmp_path / "next") == []
    charged = account.charge(RunCharge.of("next", "next", PLAN), receipts_beside(tmp_path / "next"))
    assert charged.entries == 1


def test_numbers_without_end_in_a_plan_are_refused(tmp_path):
    for change in ({"users": 10**400}, {"delta": 10**400}, {"steps": 10**400}):
        folder = tmp_path / next(iter(change))
        forged(folder, {"ledger": 2, "run_id": "r", "plan": plan_to_json(PLAN) | change})
        with pytest.raises(PrivacyError):
            read_ledger(folder)


# Forks


def test_a_fork_does_not_charge_the_ledger_of_its_parent(tmp_path):
    """Both would write the next line; a child of a data loader has all objects of its parent."""
    with create_ledger(tmp_path / "run", PLAN) as made:
        child = os.fork()
        if child == 0:
            try:
                charge(made, 0, salt="child")
            except PrivacyError as error:
                os._exit(7 if "fork" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert charge(made, 0) == [True]
    assert len(read_ledger(tmp_path / "run").entries) == 1


def test_a_fork_that_closes_a_ledger_does_not_let_another_process_in(tmp_path):
    with create_ledger(tmp_path / "run", PLAN) as made:
        child = os.fork()
        if child == 0:
            try:
                made.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(PrivacyError, match="in use by another process"):
            open_ledger(tmp_path / "run")


# Recorded answers


@pytest.fixture
def answers(tmp_path) -> Path:
    made = Answer(HISTOGRAM, {HISTOGRAM: np.arange(3) * GRID}, 5 * GRID, GRID)
    AnswerFiles(tmp_path / "answers", 1, 1).keep(0, made, PLAN)
    return tmp_path / "answers"


FIRST = "000000.safetensors"
HEADER = {"name": HISTOGRAM, "noise_std": GRID.hex(), "grid": GRID.hex(), "labels": "[]"}


def test_honest_answers_are_read(answers):
    about, (answer,) = read_answers(answers)
    assert about == {"seed": 1, "threads": 1}
    assert answer.values[HISTOGRAM].tolist() == [0, GRID, 2 * GRID]
    assert Replay([answer]).ask(Histogram(2)) is answer


def test_a_recording_answers_its_own_queries_only(answers):
    """Another name, another size, or more queries than there are answers."""
    _, recorded = read_answers(answers)
    for query in (Histogram(2, name="other"), Histogram(3), Histogram(1)):
        with pytest.raises(PrivacyError, match="was asked, and answer 0 of the recording is"):
            Replay(recorded).ask(query)
    replay = Replay(recorded)
    replay.ask(Histogram(2))
    with pytest.raises(PrivacyError, match="the recording has 1 answers only"):
        replay.ask(Histogram(2))


def test_an_answer_that_is_missing_between_others_is_noticed(answers):
    (answers / FIRST).rename(answers / "000001.safetensors")
    with pytest.raises(DPFormerError, match="is missing between others"):
        read_answers(answers)


@pytest.mark.parametrize("make", [pipe, device, sparse, deep])
def test_an_answer_that_is_no_such_file_is_refused(answers, make):
    make(answers / FIRST)
    with pytest.raises(DPFormerError):
        read_answers(answers)


def test_an_answer_that_claims_more_than_its_file_is_refused(answers):
    """Also where the file is as long as the claim, and takes no room on disk."""
    header = json.dumps(
        {"x": {"dtype": "I64", "shape": [1 << 33], "data_offsets": [0, 1 << 36]}, "__metadata__": HEADER}
    )
    data = len(header).to_bytes(8, "little") + header.encode()
    (answers / FIRST).write_bytes(data)
    with pytest.raises(DPFormerError, match="cannot be read"):
        read_answers(answers)
    os.truncate(answers / FIRST, len(data) + (1 << 36))
    with pytest.raises(DPFormerError, match="larger than any"):
        read_answers(answers)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"grid": "inf"}, "positive"),
        ({"grid": "nan"}, "positive"),
        ({"grid": "0x0p+0"}, "positive"),
        ({"noise_std": "-0x1p+3"}, "positive"),
        ({"noise_std": "0x0p+0"}, "positive"),
        ({"grid": "0x1p+99999"}, "cannot be read"),
        ({"labels": "[" * 100_000}, "cannot be read"),
        ({"labels": "3"}, "cannot be read"),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused(answers, change, word):
    (answers / FIRST).write_bytes(save({HISTOGRAM: np.arange(3)}, HEADER))
    read_answers(answers)
    (answers / FIRST).write_bytes(save({HISTOGRAM: np.arange(3)}, HEADER | change))
    with pytest.raises(DPFormerError, match=word):
        read_answers(answers)


def test_answers_that_are_no_whole_numbers_are_refused(answers):
    (answers / FIRST).write_bytes(save({HISTOGRAM: np.arange(3) / 2}, HEADER))
    with pytest.raises(DPFormerError, match="not whole"):
        read_answers(answers)


@pytest.mark.parametrize(
    "about",
    ["[]", "3", '{"seed": 1}', '{"seed": "1", "threads": 1}', *(f'{{"seed": 1, "threads": {n}}}' for n in (0, 10**9))],
)
def test_a_recording_without_a_seed_and_threads_is_refused(answers, about):
    (answers / "run.json").write_text(about)
    with pytest.raises(DPFormerError, match="is damaged"):
        read_answers(answers)


def test_a_receipt_of_another_type_cannot_be_made():
    for wrong in (("a", True, "h"), ("a", -1, "h"), (1, 1, "h"), ("a", 1, None)):
        with pytest.raises(TypeError, match="a receipt"):
            Receipt(*wrong)
