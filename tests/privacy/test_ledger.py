"""The ledger: write-ahead, refusals, replays, tampering, kills."""

import errno
import json
import math
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest

from dpformer.errors import PrivacyError
from dpformer.privacy import chain
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.chain import CHAIN, HEAD, Position
from dpformer.privacy.ledger import create_ledger, fingerprint, open_ledger, plan_from_json, plan_to_json, read_ledger
from dpformer.privacy.plan import make_plan

PLAN = make_plan(1000, 5, 1e-4, steps=20, shares={"histogram": 0.1})


def charge(ledger, *steps: int, salt: str = "") -> list[bool]:
    return [
        ledger.authorise_step(step, fingerprint(f"noise {salt}{step}"), fingerprint(f"in {step}")) for step in steps
    ]


@pytest.fixture
def begun(tmp_path) -> Path:
    """A run with its histogram and six steps charged."""
    with create_ledger(tmp_path, PLAN) as ledger:
        ledger.authorise_release("histogram", fingerprint("h"), fingerprint("data"))
        charge(ledger, *range(1, 7))
    return tmp_path


def test_what_was_charged_is_what_is_read(begun):
    account = read_ledger(begun)
    assert account.plan == PLAN
    assert account.steps_charged == 6
    assert account.released == {"histogram"}
    assert account.spent() == PLAN.mechanisms(6)
    assert epsilon(account.spent(), PLAN.delta).epsilon < PLAN.total.epsilon


def test_the_line_is_on_disk_before_the_step_is_authorised(tmp_path, monkeypatch):
    synced = b""
    real = os.fsync

    def watched(file: int) -> None:
        nonlocal synced
        real(file)
        if os.fstat(file).st_ino == (tmp_path / CHAIN).stat().st_ino:
            synced = (tmp_path / CHAIN).read_bytes()

    monkeypatch.setattr(chain.os, "fsync", watched)
    with create_ledger(tmp_path, PLAN) as ledger:
        for step in (1, 2):
            charge(ledger, step)
            assert synced.count(b"\n") == 1 + step
            assert b'"what":%d' % step in synced


def test_resume_continues(begun):
    with open_ledger(begun) as ledger:
        assert charge(ledger, 7, 8) == [True, True]
    assert read_ledger(begun).steps_charged == 8


def test_a_replay_is_the_same_release_and_a_redo_is_charged(begun):
    with open_ledger(begun) as ledger:
        assert charge(ledger, 4, 5, 6) == [False, False, False]
        assert charge(ledger, 5, 6, salt="fresh") == [True, True]
        assert not ledger.authorise_release("histogram", fingerprint("h"), fingerprint("data"))
        assert ledger.account().steps_charged == 8


def test_the_same_noise_for_another_sum_is_refused(begun):
    with open_ledger(begun) as ledger:
        with pytest.raises(PrivacyError, match="fresh noise"):
            ledger.authorise_step(5, fingerprint("noise 5"), fingerprint("other weights"))
        with pytest.raises(PrivacyError, match="fresh noise"):
            ledger.authorise_step(7, fingerprint("noise 5"), fingerprint("in 7"))
        with pytest.raises(PrivacyError, match="fresh noise"):
            ledger.authorise_step(7, fingerprint("h"), fingerprint("data"))


def test_going_past_the_budget_is_refused(begun):
    with open_ledger(begun) as ledger:
        charge(ledger, *range(7, 20))
        charge(ledger, 19, salt="fresh")
        with pytest.raises(PrivacyError, match="budget is spent"):
            charge(ledger, 20)
        with pytest.raises(PrivacyError, match="made before"):
            ledger.authorise_release("histogram", fingerprint("h2"), fingerprint("data"))
        with pytest.raises(PrivacyError, match="not in the plan"):
            ledger.authorise_release("statistics", fingerprint("s"), fingerprint("data"))
        with pytest.raises(PrivacyError, match="step 21"):
            charge(ledger, 21)
        assert ledger.account().steps_charged == PLAN.steps
        assert epsilon(ledger.account().spent(), PLAN.delta).epsilon <= PLAN.epsilon


def test_two_writers_are_kept_apart(begun):
    with open_ledger(begun), pytest.raises(PrivacyError, match="another process"):
        open_ledger(begun)
    open_ledger(begun).close()


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
        if b'"kind"' in data:
            real(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    with open_ledger(begun) as ledger:
        monkeypatch.setattr(chain.os, "write", half)
        with pytest.raises(PrivacyError, match="No space left"):
            charge(ledger, 7)
        monkeypatch.setattr(chain.os, "write", real)
        with pytest.raises(PrivacyError, match="resume"):
            charge(ledger, 7)
    with open_ledger(begun) as ledger:
        assert charge(ledger, 7, 8) == [True, True]
    assert read_ledger(begun).steps_charged == 8


def killed_child(folder: Path, delay: float | None, late: bool = False) -> int:
    """Fork a run that charges and then shows steps as fast as it can, kill -9 it, and give the last step it showed.

    The delay counts from when the child is about to open its ledger, so that kills hit creating and opening too; without
    one, the kill comes as soon as a step is shown. `late`
    plants the defect: steps are shown first and charged afterwards.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ledger = open_ledger(folder) if (folder / CHAIN).exists() else create_ledger(folder, KILL_PLAN)
            step = ledger.account().steps_charged
            while True:
                step += 1
                if late:
                    os.write(there, b"%d\n" % step)
                ledger.authorise_step(step, fingerprint(os.urandom(16)), fingerprint("x"))
                if not late:
                    os.write(there, b"%d\n" % step)  # the step's result is seen
        finally:
            os._exit(1)
    os.close(there)
    if delay is None:
        select.select([here], [], [], 30)
    else:
        time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(here, "rb") as pipe:
        seen = pipe.read().split(b"\n")[:-1]
    return int(seen[-1]) if seen else 0


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
    """kill -9 a run 150 times: what it released is always in the ledger, which can always be continued."""
    generator = random.Random(0)
    folder, runs, released, most = tmp_path / "0", 1, 0, 0
    for tries in range(150):
        if tries % 15 == 0:
            folder, released, runs = tmp_path / str(tries), 0, 0
        runs += 1
        released = max(released, killed_child(folder, generator.uniform(0.0, 0.06)))
        most = max(most, released)
        charged = charged_in(folder)
        assert charged >= released
        assert charged <= released + runs  # at most one line too many for each kill
    assert most > 20


def test_charging_too_late_would_be_caught(tmp_path):
    """The negative control of the test above: killed as soon as a step is seen, so that time does not matter."""
    create_ledger(tmp_path, KILL_PLAN).close()
    assert any(killed_child(tmp_path, None, late=True) > charged_in(tmp_path) for _ in range(100))


def test_what_the_file_system_refuses_is_one_clear_line(begun, tmp_path_factory):
    (begun / f"{HEAD}.new").mkdir()  # stands in the way of the head; as root, permissions would not
    with pytest.raises(PrivacyError, match="cannot be written"):
        open_ledger(begun)
    (begun / f"{HEAD}.new").rmdir()
    open_ledger(begun).close()
    file = tmp_path_factory.mktemp("other") / "file"
    file.touch()
    with pytest.raises(PrivacyError, match="cannot be written"):
        create_ledger(file, PLAN)


# --- tampering ------------------------------------------------------------------------------------------------------


def edit_number(lines):
    lines[3] = lines[3].replace(b'"what":2', b'"what":9')


def edit_plan(lines):
    lines[0] = lines[0].replace(b'"steps":20', b'"steps":99')


def edit_with_new_hash(lines):
    fields = json.loads(lines[3])
    del fields["hash"]
    fields["what"] = 9
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
    [edit_number, edit_plan, edit_with_new_hash, drop_from_the_middle, swap, insert, cut_the_end, cut_all, add_garbage],
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
        charge(ledger, *range(1, 9))
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
        read_ledger(begun, known=mine.position)
    with pytest.raises(PrivacyError, match="copied"):
        open_ledger(begun, known=Position(0, "0" * 64))


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


def test_thousands_of_steps_are_no_burden(tmp_path):
    with create_ledger(tmp_path, KILL_PLAN) as ledger:
        start = time.perf_counter()
        charge(ledger, *range(1, 301))
        assert time.perf_counter() - start < 30  # a few ms each, most of it waiting for the disk
    position = read_ledger(tmp_path).position
    assert position.entries == 300


def test_a_plan_survives_json():
    assert plan_from_json(json.loads(json.dumps(plan_to_json(PLAN)))) == PLAN
    free = make_plan(1000, math.inf, 1e-4, 10, steps=3)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(free)))) == free
    with pytest.raises(PrivacyError, match="cannot be read"):
        plan_from_json({"users": 3})


def test_fingerprints_keep_their_parts_apart():
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
