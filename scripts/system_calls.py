"""Faults at the system calls of a command: strace kills the process, or fails the call, at any place in the list of its calls.

The list is recorded first: every call that changes files, in its order. A try takes one of them at random and injects SIGKILL
before it, or ENOSPC or EIO in its place. A try that hit another call than one on a file (threads make the numbers vary) does not
count. The commands are `fit`, `resume`, `refit` and `account`; each must leave what `faults` asks for, and

    account    a charge that was confirmed is there, and charging again charges nothing twice
    refit      if noise was drawn, the account has the charge
    secrets    private state is readable by its owner only, and never beside a released model that opens
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from faulty import Child, Outcome, Stage, end_is_written, save_often, witness

from dpformer.privacy.account import PeopleAccount

CALLS = (
    "openat",
    "write",
    "fsync",
    "fdatasync",
    "rename",
    "unlink",
    "unlinkat",
    "mkdir",
    "rmdir",
    "ftruncate",
    "flock",
    "fchmod",
)
FAULTS = ("signal=SIGKILL", "error=ENOSPC", "error=EIO")
PATIENCE = 60.0
STRACE = shutil.which("strace")
Call = tuple[str, int]
Problems = Iterator[list[str]]


def can_trace() -> bool:
    """Whether strace is here and may attach to a process."""
    return (
        STRACE is not None
        and subprocess.run([STRACE, "-qq", "-o", os.devnull, "true"], capture_output=True).returncode == 0
    )


def traced(stage: Stage, arguments: Sequence[object], log: Path, inject: str, *faults: Callable[[], None]) -> Outcome:
    """A child under strace. It stops itself when all faults are put in, and goes on when strace is attached."""
    child = Child(stage.work, arguments, *faults, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    os.waitpid(child.pid, os.WUNTRACED)
    command = [str(STRACE), "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={','.join(CALLS)}", "-p", str(child.pid)]
    tracer = subprocess.Popen([*command, *(["-e", f"inject={inject}"] if inject else [])], stderr=subprocess.DEVNULL)
    while tracer.poll() is None and "TracerPid:\t0\n" in Path(f"/proc/{child.pid}/status").read_text():
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGCONT)
    child.signal(PATIENCE)  # a thread of a library may wait for ever for a wake-up that was failed; see `hit`
    end = child.wait()
    tracer.wait()
    return end


def in_files(stage: Stage, line: str) -> bool:
    """Whether a call is on a file of the place: not on the screen, nor on the inner pipes and events of a library."""
    return str(stage.work) in line and not re.search(rf"{stage.work}/(out|err)\.txt", line)


def hit(stage: Stage, log: Path, inject: str) -> bool:
    """Whether the fault was at a call on a file: threads make the numbers of calls vary a little."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if inject.split(":")[0] in line]
    injected = [line for line in lines if "INJECTED" in line] or (lines[-1:] if "SIGKILL" in inject else [])
    return any(in_files(stage, line) for line in injected)


def calls_of(stage: Stage, arguments: Sequence[object], *faults: Callable[[], None]) -> list[Call]:
    """Every call of a command that changes files: its kind, and its number among the calls of its kind by its thread.

    strace counts each thread by itself. What the command prints is left out.
    """
    end = traced(stage, arguments, stage.work / "calls", "", *faults)
    assert end.code == 0, end.err
    count: Counter[tuple[str, str]] = Counter()
    calls = []
    for line in (stage.work / "calls").read_text(errors="replace").splitlines():
        call = re.match(r"(\d+) +(\w+)\((.*)", line)
        if call and call[2] in CALLS:
            count[call[1], call[2]] += 1
            reading = call[2] == "openat" and "O_CREAT" not in call[3]
            if in_files(stage, line) and not reading:
                calls.append((call[2], count[call[1], call[2]]))
    return calls


def injections(calls: list[Call], dice: random.Random, tries: int) -> Iterator[str]:
    """A fault at a random place of the list, so many times."""
    for number in range(tries):
        kind, place = calls[dice.randrange(len(calls))]
        yield f"{kind}:{FAULTS[number % len(FAULTS)]}:when={place}"


def ended(end: Outcome) -> list[str]:
    """A process may be killed, succeed, or end with one line that says what to do."""
    return (
        []
        if end.code in (0, -signal.SIGKILL) or end.clear
        else [f"unclear end (code {end.code}): {end.err.strip()[-300:]}"]
    )


def secrets_of(folder: Path) -> list[str]:
    """Private state that others may read, or that stands beside a released model."""
    private = [folder / "private", *(folder / "private").rglob("*")] if (folder / "private").exists() else []
    # What is about to be published lies in private/ for a moment, in its final modes.
    secret = [path for path in private if "release" not in "/".join(path.relative_to(folder).parts)]
    open_ones = [str(path) for path in secret if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    keys = [path for path in private if path.name == "state.json"]
    beside = ["a released model stands beside its keys"] if keys and (folder / "model.safetensors").exists() else []
    return [f"others may read {path}" for path in open_ones] + beside


def in_fit(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A fault at a call of fit; then the run is brought to its end."""
    calls = calls_of(stage, [*stage.fit(stage.fresh("calls-list")), "--quiet"], save_often)
    for number, inject in enumerate(injections(calls, dice, tries)):
        folder = stage.fresh(f"calls-{number}")
        end = traced(
            stage, [*stage.fit(folder), "--quiet"], stage.work / "calls", inject, witness(stage.log(folder)), save_often
        )
        if hit(stage, stage.work / "calls", inject):
            yield _after(stage, folder, end, inject)


def in_resume(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A fault at a call of resume, of a run that was stopped after 5 steps."""
    good = stage.started("calls-good", 5)
    listed = stage.fresh("calls-list")
    shutil.copytree(good, listed)
    calls = calls_of(stage, ["resume", listed, "--quiet"], save_often)
    for number, inject in enumerate(injections(calls, dice, tries)):
        folder = stage.fresh(f"calls-{number}")
        shutil.copytree(good, folder)
        shutil.copy(stage.log(good), stage.log(folder))
        end = traced(
            stage, ["resume", folder, "--quiet"], stage.work / "calls", inject, witness(stage.log(folder)), save_often
        )
        if hit(stage, stage.work / "calls", inject):
            yield _after(stage, folder, end, inject)


def _after(stage: Stage, folder: Path, end: Outcome, inject: str) -> list[str]:
    problems = ended(end) + stage.problems(folder) + secrets_of(folder)
    if end.code == 0 and not (folder / "model.safetensors").exists():
        problems.append("reported as done, and there is no model")
    problems += stage.finish(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return [f"{inject}: {problem}" for problem in problems]


def in_account(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A fault at a call of `account add`."""
    place, copy = stage.work / "people.account", stage.work / "copy.account"
    shutil.rmtree(place, ignore_errors=True)
    assert stage.run(["account", "new", place, "--epsilon", 100, "--delta", 0.01]).code == 0
    shutil.copytree(place, copy, dirs_exist_ok=True)
    calls = calls_of(stage, ["account", "add", place, stage.whole])
    for inject in injections(calls, dice, tries):
        shutil.rmtree(place)
        shutil.copytree(copy, place)
        end = traced(stage, ["account", "add", place, stage.whole], stage.work / "calls", inject)
        if not hit(stage, stage.work / "calls", inject):
            continue
        problems = ended(end)
        if end.code == 0 and len(PeopleAccount(place).read().runs) != 1:
            problems.append("the charge was confirmed, and is not there")
        again = stage.run(["account", "add", place, stage.whole])
        if again.code or len(PeopleAccount(place).read().runs) != 1:
            problems.append(f"charging again ended with {again.code}: {again.err.strip()[-200:]}")
        yield [f"{inject}: {problem}" for problem in problems]


def in_refit(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A fault at a call of refit on a new log, charged to the account of the first run."""
    place, first = stage.work / "refit.account", stage.fresh("refit-first")
    shutil.rmtree(place, ignore_errors=True)
    assert stage.run(["account", "new", place, "--epsilon", 1000, "--delta", 0.01]).code == 0
    done = stage.run([*stage.fit(first), "--account", place])
    assert done.code == 0, done.err
    copy = stage.work / "refit-copy.account"
    shutil.copytree(place, copy, dirs_exist_ok=True)
    new = stage.work / "refit-new"

    def clean() -> list[object]:
        for path in (place, new, new.with_name("refit-new-data")):
            shutil.rmtree(path, ignore_errors=True)
        stage.log(new).unlink(missing_ok=True)
        shutil.copytree(copy, place)
        return ["refit", first, stage.work / "log.csv", "--run", new, "--quiet"]

    calls = calls_of(stage, clean(), save_often)
    for inject in injections(calls, dice, tries):
        arguments = clean()
        end = traced(stage, arguments, stage.work / "calls", inject, witness(stage.log(new)), save_often)
        if not hit(stage, stage.work / "calls", inject):
            continue
        problems = ended(end) + stage.problems(new) + secrets_of(new)
        if stage.log(new).exists() and len(PeopleAccount(place).read().runs) != 2:
            problems.append("noise was drawn, and the account has no charge for it")
        if end.code:
            resumed = any((new / "private").glob("checkpoint-*")) or end_is_written(new)
            if not resumed:
                for path in (new, new.with_name("refit-new-data")):
                    shutil.rmtree(path, ignore_errors=True)
            again = stage.run(["resume", new] if resumed else arguments, witness(stage.log(new)))
            finished = (new / "model.safetensors").exists()
            problems += (
                [] if again.code == 0 or finished else [f"could not be brought to its end: {again.err.strip()[-300:]}"]
            )
        yield [f"{inject}: {problem}" for problem in problems + stage.problems(new)]


def old_copies(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A folder copied back from last week: an account is refused; a run makes the same answers again, and nothing new."""
    place, last_week = stage.work / "old.account", stage.work / "last-week.account"
    for number in range(tries):
        if number % 2:
            folder = stage.started("old-run", dice.randint(1, 8))
            copied = stage.fresh("old-run-copy")
            shutil.copytree(folder, copied)
            problems = stage.finish(folder)
            first = set(stage.log(folder).read_text().split())
            shutil.rmtree(folder)
            shutil.copytree(copied, folder)
            problems += stage.finish(folder)
            if set(stage.log(folder).read_text().split()) != first:
                problems.append("the old copy drew noise for other sums")
            yield problems
            continue
        for path in (place, last_week):
            shutil.rmtree(path, ignore_errors=True)
        runs = [stage.fresh(f"old-{k}") for k in range(3)]
        stage.run(["account", "new", place, "--epsilon", 1000, "--delta", 0.01])
        ends = [stage.run([*stage.fit(runs[0], epochs=1), "--account", place])]
        shutil.copytree(place, last_week)
        ends.append(stage.run([*stage.fit(runs[1], epochs=1), "--account", place]))
        shutil.rmtree(place)
        shutil.copytree(last_week, place)
        late = stage.run([*stage.fit(runs[2], epochs=1), "--account", place])
        problems = [end.err for end in ends if end.code]
        yield (
            problems
            if late.clear and "old copy" in late.err
            else [*problems, f"an old account was taken: {late.err[-200:]}"]
        )
