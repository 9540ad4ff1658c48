"""Faults put into real runs, hundreds of times: what is lost, what the ledger says, what a person is told.

    python scripts/faults.py --tries 300 [--only kill] [--seed 0] [--json]

After every fault: what was reported as saved is there; every noisy sum that can have been seen is in the ledger (see `faulty`);
the run can be brought to the very model of a run that nothing disturbed, or is refused with one line that says what to do; there
is never a traceback. `--tries` counts the kills, and the faults at system calls of each command (see `system_calls`); the other
kinds get a tenth each. Exit code 1 if anything was not survived.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faulty import (
    STEPS,
    Child,
    Fault,
    Outcome,
    Stage,
    can_mount,
    end_is_written,
    mount,
    save_often,
    step_of,
    stop_after,
    witness,
)
from system_calls import can_trace, in_account, in_fit, in_refit, in_resume, old_copies

Problems = Iterator[list[str]]  # one list for each try; empty if it was survived


def kills(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """kill -9 at a random moment of fit or resume, again and again until the run is done."""
    done = number = 0
    while done < tries:
        folder, number = stage.fresh(f"kill-{number}"), number + 1
        seeded, step, charged = bool(number % 2), -1, 0
        settings: dict[str, Any] = {} if seeded else {"seed": None}
        while not (folder / "model.safetensors").exists() and done < tries:
            child = Child(stage.work, stage.begin(folder, **settings), witness(stage.log(folder)), save_often)
            child.signal(dice.uniform(0, stage.seconds))
            end = child.wait()
            if end.code not in (0, -signal.SIGKILL):
                yield [f"ended by itself: {end.err[-300:]}"]
                return
            problems = stage.problems(folder)
            lines = _lines(folder)
            if (folder / "model.safetensors").exists():
                problems += stage.finish(folder, same=seeded, **settings)
            elif (step_of(folder) < step and not end_is_written(folder)) or lines < charged:
                problems.append("a checkpoint or a charge that was there has gone")
            step, charged = max(step, step_of(folder)), lines
            if end.code:
                done += 1
                yield problems
            elif problems:
                yield problems
        if not (folder / "model.safetensors").exists():
            problems = stage.finish(folder, same=seeded, **settings)
            if problems:
                yield problems
        shutil.rmtree(folder, ignore_errors=True)


def _lines(folder: Path) -> int:
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() and (step_of(folder) >= 0 or end_is_written(folder)) else 0


def stops(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """SIGTERM or SIGINT at a random moment: what is reported as saved must be saved."""
    for number in range(tries):
        folder = stage.fresh(f"stop-{number}")
        child = Child(stage.work, stage.fit(folder), witness(stage.log(folder)))
        child.signal(dice.uniform(0, stage.seconds), dice.choice((signal.SIGTERM, signal.SIGINT)))
        end = child.wait()
        problems = stage.problems(folder)
        if "saved after step" in end.err:
            reported = int(end.err.split("saved after step ")[1].split(";")[0])
            if step_of(folder) != reported:
                problems.append(f"step {reported} was reported as saved, and the checkpoint is of {step_of(folder)}")
        # polars, stopped while it calls Python, prints a panic of one line that quotes a traceback; any other is a fault.
        if any(
            "Traceback" in line and "PyErr { type: <class 'KeyboardInterrupt'>" not in line
            for line in end.err.splitlines()
        ):
            problems.append(end.err[-300:])
        yield problems + stage.finish(folder)


def full_disk(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A file system of a few kilobytes in memory; when it has space again, the run goes on."""
    place = stage.work / "disk"
    for _ in range(tries):
        size = 4 * dice.randint(1, 40)
        mount(place, "", size)
        try:
            folder = place / "run"
            stage.log(folder).unlink(missing_ok=True)
            end = stage.run(stage.fit(folder), witness(stage.log(folder)), save_often)
            problems = stage.problems(folder)
            if end.code:
                problems += _told(end, "No space left", "resume", "Free space", "space left", "untouched")
            mount(place, "remount,", 1 << 14)
            yield problems + stage.finish(folder)
        finally:
            subprocess.run(["umount", str(place)], check=True)


def file_limit(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """No file may grow beyond a random size, as with a quota."""
    for number in range(tries):
        size = int(10 ** dice.uniform(1, 5))

        def limited(size: int = size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

        # What the child says goes through a pipe that has no size.
        folder = stage.fresh(f"limit-{number}")
        end = stage.run(stage.fit(folder), witness(stage.log(folder)), save_often, limited)
        problems = stage.problems(folder)
        if end.code:
            problems += _told(end, "File too large") if size > 400 else []  # below, the line itself does not fit
        yield problems + stage.finish(folder)


def read_only(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A folder that cannot be written: for a new run, and for one that goes on."""
    place = stage.work / "readonly"
    for _ in range(tries):
        mount(place, "", 1 << 14)
        try:
            folder = place / "run"
            stage.log(folder).unlink(missing_ok=True)
            steps = dice.randint(1, STEPS - 1)
            stage.run(stage.fit(folder), witness(stage.log(folder)), stop_after(steps))
            mount(place, "remount,ro,", 1 << 14)
            problems = _told(stage.run(["resume", folder], witness(stage.log(folder))), "Read-only", "permissions")
            problems += _told(stage.run(stage.fit(place / "new")), "Read-only")
            problems += stage.problems(folder)
            mount(place, "remount,rw,", 1 << 14)
            if step_of(folder) != steps:
                problems.append("the checkpoint has changed")
            yield problems + stage.finish(folder)
        finally:
            subprocess.run(["umount", str(place)], check=True)


UNFINISHED = (
    *("config.json", "ledger.jsonl", "ledger.head"),
    *("state.safetensors", "state.json", "sha256.json"),
)
RELEASED = (
    "config.json",
    "items.jsonl",
    "privacy.json",
    "files.json",
    "model.safetensors",
    "ledger.jsonl",
    "ledger.head",
)


def damaged_state(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A flipped bit or a cut in a file of an unfinished run: resume refuses, or ends in the very same model."""
    good = stage.started("good", 5)
    for number in range(tries):
        folder = stage.fresh(f"state-{number}")
        shutil.copytree(good, folder)
        shutil.copy(stage.log(good), stage.log(folder))
        name = UNFINISHED[number % len(UNFINISHED)]
        path = next((folder / "private").rglob(name)) if name.startswith("s") else folder / name
        how = damage(path, dice)
        end = stage.run(["resume", folder], witness(stage.log(folder)))
        problems = _told(end) if end.code else stage.wrong_end(folder)
        seen = set(stage.log(folder).read_text().split()) - set(stage.log(good).read_text().split())
        if end.code and seen:
            problems.append("noise was drawn before the damage was noticed")
        yield [f"{name}, {how}: {problem}" for problem in problems]
        shutil.rmtree(folder)


def damaged_release(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """A flipped bit or a cut in a released folder: it is refused, or answers exactly as before."""
    right = answers(stage, stage.whole)
    for number in range(tries):
        folder = stage.fresh("whole-copy")
        shutil.copytree(stage.whole, folder)
        name = RELEASED[number % len(RELEASED)]
        how = damage(folder / name, dice)
        problems = []
        for end, expected in zip(answers(stage, folder), right, strict=True):
            said = end.out.replace("whole-copy", "whole")
            problems += _told(end) if end.code else ["damage was not noticed"] * (said != expected.out)
        yield [f"{name}, {how}: {problem}" for problem in problems]


def answers(stage: Stage, folder: Path) -> list[Outcome]:
    """What a released folder answers: recommendations with their scores, and its statement."""
    histories = ["i03,i07", "i00,i05,i11,i02,i19,i08", "unknown"]
    asked = [["recommend", folder, "--history", history, "-k", 20, "--json", "--seen"] for history in histories]
    return [stage.run(arguments) for arguments in [*asked, ["show", folder, "--json"]]]


def damage(path: Path, dice: random.Random) -> str:
    """Flip a bit, or cut off the end; says which."""
    data = bytearray(path.read_bytes())
    if dice.random() < 0.5:
        place = dice.randrange(len(data))
        bit = dice.randrange(8)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        return f"bit {bit} of byte {place} flipped"
    length = dice.randrange(len(data))
    path.write_bytes(data[:length])
    return f"cut to {length} of {len(data)} bytes"


def clock(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """The clock jumps by years at every look, forwards and back, and files are dated anywhere."""
    for number in range(tries):
        seed = dice.random()

        def jumping(seed: float = seed) -> None:
            jumps = random.Random(seed)
            time.time = lambda: jumps.uniform(0, 4e9)
            time.time_ns = lambda: int(jumps.uniform(0, 4e18))

        folder = stage.started(f"clock-{number}", dice.randint(1, STEPS - 1))
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (dice.uniform(0, 4e9),) * 2)
        end = stage.run(["resume", folder], witness(stage.log(folder)), jumping, save_often)
        yield (_told(end, "never") if end.code else []) + stage.finish(folder)


def two_processes(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """Several processes on one folder: on a new one, and on one that is being trained; private or not."""
    for number in range(tries):
        folder, budget = stage.fresh(f"two-{number}"), 20 if number % 2 else "inf"
        works = [stage.work / f"process-{k}" for k in range(3)]
        for work in works:
            work.mkdir(exist_ok=True)
        arguments = [stage.fit(folder, seed=k + 1, epsilon=budget) for k in range(3)]
        running = [Child(work, given, slow(dice.random())) for work, given in zip(works, arguments, strict=True)]
        intruder = Child(stage.work, ["resume", folder], slow(dice.random()))
        ends, late = [child.wait() for child in running], intruder.wait()
        winners = [k for k, end in enumerate(ends) if end.code == 0]
        problems = [
            problem for end in ends if end.code for problem in _told(end, "in use by another", "exists already")
        ]
        problems += _told(late, "in use by another", "missing", "finished", "no run", "is not") if late.code else []
        if len(winners) + (late.code == 0) != 1:
            problems.append(f"{len(winners)} processes think that they have made the run")
        elif winners:
            seed = json.loads((folder / "config.json").read_text())["recipe"]["seed"]
            if seed != winners[0] + 1:
                problems.append("the settings in the folder are another process's")
            if budget == 20 and seed == 1:
                problems += stage.wrong_end(folder)
        yield problems


def slow(seconds: float) -> Fault:
    """Begin a little later."""
    return lambda: time.sleep(seconds * 0.05)


def memory(stage: Stage, dice: random.Random, tries: int) -> Problems:
    """An allocation that fails in a micro-batch: Python's, torch's, and a real limit on the address space."""
    for number in range(tries):
        step = dice.randint(1, STEPS)
        kind = ("python", "torch", "limit")[number % 3]
        folder = stage.fresh(f"memory-{number}")
        end = stage.run(stage.fit(folder), witness(stage.log(folder)), short_of_memory(kind, step))
        problems = stage.problems(folder) + _told(end, "out of memory")
        charged = _charged(folder)
        if charged != step - 1:
            problems.append(f"{charged} steps are charged, and {step - 1} were made")
        yield [f"{kind}: {problem}" for problem in problems + stage.finish(folder)]


def _charged(folder: Path) -> int:
    from dpformer.privacy import read_ledger

    return read_ledger(folder).steps_charged


def short_of_memory(kind: str, step: int) -> Fault:
    """Memory runs out in the first micro-batch of a step."""

    def install() -> None:
        import torch

        from dpformer.fit.dpsgd import Trainer
        from dpformer.fit.workers import Worker

        real, make_step, at = Worker.add, Trainer.make_step, [0]

        def counted(self: Trainer, asker: Any) -> Any:
            at[0] = self.step + 1
            return make_step(self, asker)

        def failing(self: Worker, batch: Any, masks: Any = None) -> float:
            if at[0] == step:
                if kind == "python":
                    raise MemoryError
                if kind == "torch":
                    torch.empty(1 << 50)
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
                torch.zeros(1 << 26)  # 256 MB that are not there
            return real(self, batch, masks)

        Worker.add, Trainer.make_step = failing, counted  # type: ignore[method-assign]

    return install


def _told(end: Outcome, *words: str) -> list[str]:
    """Nothing if the end was an error of one line with one of the words in it; else what was wrong."""
    if not end.clear or (words and not any(word in end.err for word in words)):
        return [f"unclear end (code {end.code}): {(end.err or end.out).strip()[-400:]}"]
    return []


KINDS: dict[str, Callable[[Stage, random.Random, int], Problems]] = {
    "kill": kills,
    "stop": stops,
    "full disk": full_disk,
    "file limit": file_limit,
    "read-only": read_only,
    "damaged state": damaged_state,
    "damaged release": damaged_release,
    "clock": clock,
    "two processes": two_processes,
    "memory": memory,
    "calls of fit": in_fit,
    "calls of resume": in_resume,
    "calls of refit": in_refit,
    "calls of account": in_account,
    "old copy": old_copies,
}
NEED_MOUNT = ("full disk", "read-only")


def try_kind(stage: Stage, kind: str, tries: int, seed: int) -> dict[str, Any]:
    """All tries of one kind, and what was wrong."""
    if kind in NEED_MOUNT and not can_mount():
        return {"tried": 0, "survived": 0, "problems": [], "skipped": "needs the right to mount a file system"}
    by_call = kind.startswith("calls")
    if by_call and not can_trace():
        return {"tried": 0, "survived": 0, "problems": [], "skipped": "needs strace, with the right to trace"}
    if kind != "kill" and not by_call:
        tries = max(2, tries // 10)
    if kind.startswith("damaged"):
        tries = max(len(UNFINISHED), 4 * tries)  # every file
    began, results = time.monotonic(), list(KINDS[kind](stage, random.Random(seed), tries))
    failed = Counter(problem for result in results for problem in result)
    return {
        "tried": len(results),
        "survived": sum(not result for result in results),
        "seconds": round(time.monotonic() - began, 1),
        "problems": [f"{count} x {problem}" for problem, count in failed.most_common(20)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--only", action="append", choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dpformer-faults-") as work:
        stage, report = Stage(Path(work)), {}
        for kind in options.only or KINDS:
            report[kind] = part = try_kind(stage, kind, options.tries, options.seed)
            if not options.json:
                seconds = f"{part.get('seconds', 0):8.1f} s  {part.get('skipped', '')}"
                print(f"{kind:16} tried {part['tried']:5}   survived {part['survived']:5} {seconds}", flush=True)
                for problem in part["problems"]:
                    print(f"    {problem}")
    if options.json:
        print(json.dumps(report, indent=2))
    sys.exit(any(part["tried"] != part["survived"] for part in report.values()))


if __name__ == "__main__":
    main()
