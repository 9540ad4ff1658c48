"""The ledger: write-ahead, refusals, replays, tampering, kills."""

import errno
import json
import math
import os
import random
import signal
from pathlib import Path

import pytest

from dpformer.errors import PrivacyError
from dpformer.privacy import chain
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.chain import CHAIN, HEAD, LOCK, Position
from dpformer.privacy.ledger import create_ledger, open_ledger, read_ledger
from dpformer.privacy.plan import GRADIENTS, make_plan, plan_from_json, plan_to_json
from tests.asking import charge, tag, watch_syncs

PLAN = make_plan(1000, 5, 1e-4, steps=20, shares={"histogram": 0.1})


@pytest.fixture
def begun(tmp_path) -> Path:
    """A run with its histogram and six steps charged: places 0 to 6."""
    with create_ledger(tmp_path, PLAN) as ledger:
        assert charge(ledger, *range(7)) == [True] * 7
    return tmp_path


def test_what_was_charged_is_what_is_read(begun):
    account = read_ledger(begun)
    assert account.plan == PLAN
    assert account.steps_charged == 6
    assert account.released == {"histogram"}
    assert account.spent() == PLAN.charges(6)
    assert epsilon(account.spent(), PLAN.delta).epsilon < PLAN.total.epsilon


def test_the_line_is_on_disk_before_the_charge_returns(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch, tmp_path / CHAIN)
    with create_ledger(tmp_path, PLAN) as ledger:
        for place in (0, 1):
            charge(ledger, place)
            assert synced().count(b"\n") == 2 + place
            assert tag(str(place)).encode() in synced()


def test_a_line_holds_the_name_and_the_tag_and_nothing_else(begun):
    lines = [json.loads(line) for line in (begun / CHAIN).read_text().splitlines()]
    assert all(set(line) == {"name", "tag", "n", "previous", "hash"} for line in lines[1:])
    assert [line["name"] for line in lines[1:]] == ["histogram", *[GRADIENTS] * 6]


def test_resume_continues(begun):
    with open_ledger(begun) as ledger:
        assert charge(ledger, 7, 8) == [True, True]
    assert read_ledger(begun).steps_charged == 8


def test_a_replay_is_the_same_answer_and_is_not_charged_again(begun):
    before = (begun / CHAIN).read_bytes()
    with open_ledger(begun) as ledger:
        assert charge(ledger, 4, 5, 6) == [False, False, False]
        assert charge(ledger, 0) == [False]
    assert (begun / CHAIN).read_bytes() == before


def test_a_replay_with_another_sum_is_refused(begun):
    with open_ledger(begun) as ledger:
        for place in (0, 5, 6):
            with pytest.raises(PrivacyError, match="another sum"):
                charge(ledger, place, salt="other")
        assert ledger.account().steps_charged == 6


def test_a_place_that_is_left_out_is_refused(begun):
    with open_ledger(begun) as ledger, pytest.raises(PrivacyError, match="in the plan's order"):
        charge(ledger, 8)
    assert read_ledger(begun).steps_charged == 6


def test_another_name_than_the_plans_is_refused(begun):
    with open_ledger(begun) as ledger:
        for place, name in ((7, "histogram"), (0, GRADIENTS), (7, "statistics")):
            with pytest.raises(PrivacyError, match="of the plan is"):
                ledger.charge(place, name, tag("7"))


def test_going_past_the_budget_is_refused(begun):
    with open_ledger(begun) as ledger:
        charge(ledger, *range(7, 21))
        for place in (21, 22, 1000):
            with pytest.raises(PrivacyError, match="budget is spent"):
                ledger.charge(place, GRADIENTS, tag("more"))
        with pytest.raises(PrivacyError, match="budget is spent"):
            ledger.charge(-1, GRADIENTS, tag("more"))
        assert ledger.account().steps_charged == PLAN.steps
        assert epsilon(ledger.account().spent(), PLAN.delta).epsilon <= PLAN.epsilon


def test_two_writers_are_kept_apart(begun):
    with open_ledger(begun), pytest.raises(PrivacyError, match="another process"):
        open_ledger(begun)
    open_ledger(begun).close()


def test_a_closed_ledger_leaves_its_lock_file(begun):
    """Deleting it would let two processes lock two files of one name."""
    before = (begun / LOCK).stat().st_ino
    open_ledger(begun).close()
    assert (begun / LOCK).stat().st_ino == before


def test_on_a_disk_without_file_locks_a_ledger_is_refused(tmp_path, monkeypatch):
    """Some network disks have no flock. A marker file in its place would outlive a crash, so it is not taken."""

    def missing(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    with pytest.raises(PrivacyError, match="disk that has locks"):
        create_ledger(tmp_path, PLAN)


def test_a_run_is_not_begun_twice(begun):
    with pytest.raises(PrivacyError, match="resume"):
        create_ledger(begun, PLAN)
    (begun / CHAIN).unlink()
    with pytest.raises(PrivacyError, match="resume"):
        create_ledger(begun, PLAN)
    with pytest.raises(PrivacyError, match="missing"):
        open_ledger(begun)


def test_a_run_without_privacy_has_no_ledger(tmp_path):
    with pytest.raises(PrivacyError, match="epsilon inf"):
        create_ledger(tmp_path, make_plan(1000, math.inf, 1e-4, 10, steps=3))


# --- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, 60, 150])
def test_a_torn_last_line_is_dropped(begun, cut):
    """A crash in the middle of a write: the line is torn, the head does not know of it yet."""
    position = read_ledger(begun).position
    with open_ledger(begun) as ledger:
        charge(ledger, 7)
    data = (begun / CHAIN).read_bytes()
    (begun / CHAIN).write_bytes(data[:-cut])
    (begun / HEAD).write_text(json.dumps({"entries": position.entries, "hash": position.hash}))
    assert read_ledger(begun).steps_charged == 6
    with open_ledger(begun) as ledger:
        assert charge(ledger, 7) == [True]
    assert read_ledger(begun).steps_charged == 7


def test_a_full_disk_releases_nothing_and_can_be_mended(begun, monkeypatch):
    real = os.write

    def half(file: int, data: bytes) -> int:
        if b'"tag"' in data:
            real(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    with open_ledger(begun) as ledger:
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(PrivacyError, match="No space left"):
            charge(ledger, 7)
        monkeypatch.setattr(os, "write", real)
        with pytest.raises(PrivacyError, match="resume"):
            charge(ledger, 7)
    with open_ledger(begun) as ledger:
        assert charge(ledger, 7, 8) == [True, True]
    assert read_ledger(begun).steps_charged == 8


def killed_child(folder: Path, steps: int, late: bool = False) -> int:
    """Fork a run that charges and then shows steps, kill -9 it when `steps` were seen, and give the number it showed.

    The kill comes whenever the parent gets to it, in the middle of anything, opening and creating included for `steps` 0: only
    steps are counted, no time. `late` plants the defect: steps are shown first and charged afterwards, and the child waits
    between the two, so that the kill hits there.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(here)
            ledger = open_ledger(folder) if (folder / CHAIN).exists() else create_ledger(folder, KILL_PLAN)
            place = ledger.account().steps_charged
            while True:
                if late:
                    os.write(there, b".")
                    signal.pause()
                ledger.charge(place, GRADIENTS, os.urandom(32).hex())
                if not late:
                    os.write(there, b".")  # the step's result is seen
                place += 1
        finally:
            os._exit(1)
    os.close(there)
    shown = 0
    while shown < steps:
        data = os.read(here, 1)
        assert data, "the child ended by itself"
        shown += 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(here, "rb") as pipe:
        return shown + len(pipe.read())


KILL_PLAN = make_plan(10, 5, 1e-2, steps=10**6)


def charged_in(folder: Path) -> int:
    """Steps charged; none where a kill hit before the ledger was created, which the message must say."""
    try:
        return read_ledger(folder).steps_charged
    except PrivacyError as problem:
        if not any(words in str(problem) for words in ("is missing", "never began")):
            raise
    for file in folder.glob("*"):
        file.unlink()
    return 0


def test_killed_at_random_points_it_never_says_less_than_was_released(tmp_path):
    """kill -9 a run 80 times: what it released is always in the ledger, which can always be continued."""
    generator = random.Random(0)
    for run in range(8):
        folder, released = tmp_path / str(run), 0
        for kills in range(1, 11):
            before = charged_in(folder)
            shown = killed_child(folder, generator.randrange(8))
            released += shown
            charged = charged_in(folder)
            assert charged >= before + shown
            assert charged <= released + kills  # at most one line too many for each kill
        assert released > 10


def test_charging_too_late_would_be_caught(tmp_path):
    """The negative control of the test above."""
    create_ledger(tmp_path, KILL_PLAN).close()
    assert killed_child(tmp_path, 1, late=True) > charged_in(tmp_path)


def test_what_the_file_system_refuses_is_one_clear_line(begun, tmp_path_factory):
    aside = begun / f".{HEAD}.partial"
    aside.mkdir()  # stands in the way of the head; as root, permissions would not
    with pytest.raises(PrivacyError, match="cannot be written"):
        open_ledger(begun)
    aside.rmdir()
    open_ledger(begun).close()
    file = tmp_path_factory.mktemp("other") / "file"
    file.touch()
    with pytest.raises(PrivacyError, match="cannot be written"):
        create_ledger(file, PLAN)


# --- tampering ------------------------------------------------------------------------------------------------------


def edit_number(lines):
    lines[3] = lines[3].replace(b'"n":3', b'"n":9')


def edit_name(lines):
    lines[3] = lines[3].replace(b'"gradients"', b'"histogram"')


def edit_plan(lines):
    lines[0] = lines[0].replace(b'"steps":20', b'"steps":99')


def edit_with_new_hash(lines):
    fields = json.loads(lines[3])
    del fields["hash"]
    fields["tag"] = tag("another")
    lines[3] = chain._line(fields)[0]


def drop_from_the_middle(lines):
    del lines[3]


def swap(lines):
    lines[3], lines[4] = lines[4], lines[3]


def insert(lines):
    lines.insert(4, lines[3])


def cut_the_end(lines):
    del lines[-2:]


def cut_all(lines):
    del lines[1:]


def add_garbage(lines):
    lines.append(b"{}\n")


@pytest.mark.parametrize(
    "tamper",
    [
        edit_number,
        edit_name,
        edit_plan,
        edit_with_new_hash,
        drop_from_the_middle,
        swap,
        insert,
        cut_the_end,
        cut_all,
        add_garbage,
    ],
)
def test_tampering_is_noticed(begun, tamper):
    lines = (begun / CHAIN).read_bytes().splitlines(keepends=True)
    tamper(lines)
    (begun / CHAIN).write_bytes(b"".join(lines))
    with pytest.raises(PrivacyError, match=r"changed|cut off"):
        read_ledger(begun)
    with pytest.raises(PrivacyError, match=r"changed|cut off"):
        open_ledger(begun)


def test_every_flipped_bit_is_noticed(begun):
    data = (begun / CHAIN).read_bytes()
    generator = random.Random(1)
    for _ in range(60):
        place = generator.randrange(len(data))
        flipped = bytearray(data)
        flipped[place] ^= 1 << generator.randrange(8)
        (begun / CHAIN).write_bytes(flipped)
        with pytest.raises(PrivacyError):
            read_ledger(begun)


def test_another_runs_ledger_is_noticed(begun, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with create_ledger(other, PLAN) as ledger:
        charge(ledger, *range(8))
    (begun / CHAIN).write_bytes((other / CHAIN).read_bytes())
    with pytest.raises(PrivacyError, match="copied"):
        read_ledger(begun)


def test_a_whole_copied_ledger_is_noticed_by_what_the_checkpoint_remembers(begun, tmp_path_factory):
    mine = read_ledger(begun)
    other = tmp_path_factory.mktemp("other")
    create_ledger(other, PLAN).close()
    for name in (CHAIN, HEAD):
        (begun / name).write_bytes((other / name).read_bytes())
    with pytest.raises(PrivacyError, match="copied"):
        read_ledger(begun, run_id=mine.run_id)
    with pytest.raises(PrivacyError, match="cut off"):
        read_ledger(begun, expected=mine.position)
    with pytest.raises(PrivacyError, match="copied"):
        open_ledger(begun, expected=Position(0, "0" * 64))


def test_a_missing_or_damaged_head_is_noticed(begun):
    (begun / HEAD).write_text("{")
    with pytest.raises(PrivacyError, match="damaged"):
        read_ledger(begun)
    (begun / HEAD).unlink()
    with pytest.raises(PrivacyError, match="missing"):
        read_ledger(begun)


def test_a_refused_ledger_is_not_left_locked(begun):
    with pytest.raises(PrivacyError, match="copied"):
        open_ledger(begun, run_id="another")
    open_ledger(begun).close()


def test_hundreds_of_steps_are_one_line_each(tmp_path):
    with create_ledger(tmp_path, KILL_PLAN) as ledger:
        charge(ledger, *range(300))
    assert read_ledger(tmp_path).position.entries == 300


def forged(folder: Path, header: dict, *entries: dict) -> None:
    """A chain with sound hashes, whatever it says."""
    lines, previous = [], ""
    for number, fields in enumerate([header, *entries]):
        line, previous = chain._line({**fields, **({"n": number} if number else {}), "previous": previous})
        lines.append(line)
    folder.mkdir()
    (folder / CHAIN).write_bytes(b"".join(lines))
    (folder / HEAD).write_text(json.dumps({"entries": len(entries), "hash": previous}))


@pytest.mark.parametrize(
    ("header", "entry", "word"),
    [
        ({}, {"name": GRADIENTS, "tag": "0"}, "'gradients' at place 0"),
        ({}, {"name": "statistics", "tag": "0"}, "which the plan does not have"),
        ({}, {"name": "histogram"}, "lacks 'tag'"),
        ({}, {"what": 1, "tag": "0"}, "lacks 'name'"),
        ({"ledger": 1}, {"name": "histogram", "tag": "0"}, "its noise leaks"),
        ({"ledger": 3}, {"name": "histogram", "tag": "0"}, "update dpformer"),
        ({"ledger": None}, {"name": "histogram", "tag": "0"}, "of format None"),
        ({"plan": {"users": 3}}, {"name": "histogram", "tag": "0"}, "cannot be read"),
        ({"plan": None}, {"name": "histogram", "tag": "0"}, "cannot be read"),
    ],
)
def test_a_sound_chain_that_says_what_cannot_be_is_refused(tmp_path, header, entry, word):
    usual = {"ledger": 2, "run_id": "r", "plan": plan_to_json(PLAN)}
    forged(tmp_path / "good", usual, {"name": "histogram", "tag": "0"})
    read_ledger(tmp_path / "good")
    forged(tmp_path / "bad", {**usual, **header}, entry)
    for read in (read_ledger, open_ledger):
        with pytest.raises(PrivacyError, match=word):
            read(tmp_path / "bad")


def test_a_plan_survives_json():
    assert plan_from_json(json.loads(json.dumps(plan_to_json(PLAN)))) == PLAN
    free = make_plan(1000, math.inf, 1e-4, 10, steps=3)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(free)))) == free
    with pytest.raises(PrivacyError, match="cannot be read"):
        plan_from_json({"users": 3})
