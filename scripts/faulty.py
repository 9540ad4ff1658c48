"""What `faults.py` and `soak.py` share: the command line in a forked process, with something going wrong inside, and a witness.

The parent imports everything once and computes the accounting once, and never uses polars, whose threads do not survive a fork.
Each child is a real process that runs `dpformer.cli.main`, writes to files, and can be killed.

The witness is independent of the ledger: each child appends the tag of the sum to a file before its noise is drawn. So every
answer that can have been seen is in that file, and has to be in the ledger.
"""

# ruff: noqa: E402  the number of threads is fixed before numpy and torch are imported

import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
    os.environ.setdefault(threads, "1")

import numpy as np
import torch

from dpformer.cli import main
from dpformer.errors import DPFormerError
from dpformer.fit import recipe
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import Run
from dpformer.privacy import Curator, Keys, build, chain, ledger, plan, read_ledger, statement
from dpformer.privacy.plan import spending

PRESET = "dpformer"
SMALL = {"epsilon": 20, "delta": 0.001, "d": 8, "max_length": 6, "epochs": 5, "batch_size": 30}
STEPS = 10
Fault = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its exit code, or minus the signal that ended it, and what it said."""

    code: int
    out: str
    err: str

    @property
    def clear(self) -> bool:
        """An error that a person can act upon: told, and no traceback."""
        last = self.err.strip().rpartition("\n")[2]
        return self.code in (1, 2) and last.startswith("error: ") and "Traceback" not in self.err + self.out


class Child:
    """`dpformer ARGUMENTS` in a forked process, with faults put in before it begins."""

    def __init__(self, work: Path, arguments: Sequence[object], *faults: Fault) -> None:
        self.out, self.err = work / "out.txt", work / "err.txt"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_dpformer([str(argument) for argument in arguments], faults)

    def _be_dpformer(self, arguments: list[str], faults: Sequence[Fault]) -> None:
        code = 70
        try:
            for number, path in ((1, self.out), (2, self.err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            for fault in faults:
                fault()
            sys.argv = ["dpformer", *arguments]
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001  what a person would see as a traceback
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def signal(self, after: float, number: int = signal.SIGKILL) -> None:
        """Send a signal after some seconds, or not at all if it has ended by then."""
        end = time.monotonic() + after
        while time.monotonic() < end:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(min(0.002, max(0.0, end - time.monotonic())))
        os.kill(self.pid, number)

    def wait(self) -> Outcome:
        """Wait for its end."""
        _, status = os.waitpid(self.pid, 0)
        return Outcome(os.waitstatus_to_exitcode(status), _text(self.out), _text(self.err))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def import_all() -> None:
    """What commands import when they run, and what torch imports when the first optimiser is made."""
    for name in ("cli.app", "fit.run", "artifact", "cli.output", "data"):
        importlib.import_module(f"dpformer.{name}")
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])


def cached_accounting() -> None:
    """The same accounting, computed once for each question: hundreds of runs ask the same."""
    for module, name in [
        (plan, "epsilon"),
        (build, "epsilon"),
        (build, "attack_bound"),
        (build, "gaussian_multiplier"),
    ]:
        setattr(module, name, functools.cache(getattr(module, name)))
    real, made = plan.make_plan, {}

    def make_plan(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))
        if key not in made:
            made[key] = real(*arguments, **options)
        return made[key]

    recipe.make_plan = make_plan  # type: ignore[assignment]


def account_for(made: plan.PrivacyPlan) -> None:
    """Ask all that a run of this plan will ask, so that forked children find the answers in the cache."""
    names = [made.planned(place).name for place in range(len(made.releases) + made.steps)]
    charges = tuple(ledger.Entry(name, "") for name in names)
    account = ledger.Account("", made, charges, chain.Position(len(charges), ""))
    about = build.Circumstances(statement.DataPart(catalogue="log"), seeded=True)
    build.build_statement(made, account, about, statement.TuningPart(kind="undeclared"))
    spending(made)


def witness(path: Path) -> Fault:
    """Writes down the tag of each sum before the key of its noise is made, in the child."""

    def install() -> None:
        ask, noise, asked = Curator.ask, Keys.noise, [""]

        def named(self: Any, query: Any) -> Any:
            asked[0] = query.name
            return ask(self, query)

        def seen(self: Any, array: str, digest: bytes) -> bytes:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, f"{self.tag(asked[0], digest)}\n".encode())
            os.close(descriptor)
            return noise(self, array, digest)

        Curator.ask, Keys.noise = named, seen

    return install


def save_often() -> None:
    """A checkpoint after every step."""
    Run.train = functools.partialmethod(Run.train, checkpoint_seconds=-1.0)  # type: ignore[assignment, method-assign]


def make_data(work: Path, users: int = 60, items: int = 20, seed: int = 0) -> Path:
    """A log of people who walk around a circle of items, prepared by the command."""
    random = np.random.default_rng(seed)
    lines = ["user_id,item_id,timestamp"]
    for user in range(users):
        here = int(random.integers(items))
        for moment in range(int(random.integers(2, 12))):
            lines.append(f"person-{user:04d}-x7Qz,i{here:02d},{moment}")
            here = (here + int(random.integers(1, 3))) % items
    (work / "log.csv").write_text("\n".join(lines) + "\n")
    done = Child(work, ["prepare", work / "log.csv", "-o", work / "data"]).wait()
    assert done.code == 0, done.err
    return work / "data"


class Stage:
    """A place with data, a reference run that nothing disturbed, and checks of runs that something did."""

    def __init__(self, work: Path) -> None:
        self.work = work
        import_all()
        cached_accounting()
        torch.set_num_threads(1)
        self.data = make_data(work)
        account_for(make_recipe(PRESET, **SMALL).plan(60))
        began = time.monotonic()
        self.whole = work / "whole"
        done = self.run(self.fit(self.whole), save_often)
        assert done.code == 0, done.err
        self.seconds = time.monotonic() - began
        self.model = (self.whole / "model.safetensors").read_bytes()

    def fit(self, folder: Path, seed: int | None = 1, **settings: Any) -> list[object]:
        """Arguments of `fit`; without a seed, the keys come from the system."""
        noise = ["--seed", seed] if seed is not None else []
        pairs = [part for key, value in {**SMALL, **settings}.items() for part in ("--set", f"{key}={value}")]
        return ["fit", self.data, "--run", folder, "--preset", PRESET, *noise, *pairs]

    def begin(self, folder: Path, **settings: Any) -> list[object]:
        """`fit`, or `resume` where there is something to go on with; what never began is thrown away first."""
        if any((folder / "private").glob("checkpoint-*")) or end_is_written(folder):
            return ["resume", folder]
        shutil.rmtree(folder, ignore_errors=True)
        return self.fit(folder, **settings)

    def run(self, arguments: Sequence[object], *faults: Fault) -> Outcome:
        """A child, to its end."""
        return Child(self.work, arguments, *faults).wait()

    def fresh(self, name: str) -> Path:
        """A path for a new run; what stood there is gone."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        self.log(folder).unlink(missing_ok=True)
        return folder

    def log(self, folder: Path) -> Path:
        """Where the witness of a run writes."""
        return self.work / f"{folder.name}.witness"

    def started(self, name: str, steps: int, **settings: Any) -> Path:
        """A run that was stopped and saved after so many steps."""
        folder = self.fresh(name)
        done = self.run(self.fit(folder, **settings), witness(self.log(folder)), stop_after(steps))
        assert done.code == 130, done
        assert f"saved after step {steps}" in done.err, done
        assert step_of(folder) == steps
        return folder

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with a run that something happened to: the ledger against the witness."""
        log = self.log(folder)
        seen = set(log.read_text().split()) if log.exists() else set()
        try:
            account = read_ledger(folder)
        except DPFormerError as error:
            return [f"noise was drawn, and the ledger cannot be read: {error}"] if seen else []
        charged = {entry.tag for entry in account.entries}
        problems = []
        if not seen <= charged:
            problems.append(f"{len(seen - charged)} answers could be seen and are not in the ledger")
        if account.steps_charged > account.plan.steps:
            problems.append("more steps charged than planned")
        return problems

    def wrong_end(self, folder: Path, same: bool = True) -> list[str]:
        """What is wrong with a run that was brought to its end after all."""
        problems = self.problems(folder)
        if not (folder / "model.safetensors").exists():
            return [*problems, "no model was released"]
        if same and (folder / "model.safetensors").read_bytes() != self.model:
            problems.append("the model is not that of the undisturbed run")
        if (folder / "private").exists():
            problems.append("private state is left")
        said = json.loads((folder / "privacy.json").read_text())
        account = read_ledger(folder)
        if said["steps"]["charged"] != account.steps_charged or said["ledger"]["hash"] != account.position.hash:
            problems.append("the statement does not say what the ledger says")
        if account.steps_charged != STEPS:
            problems.append(f"{account.steps_charged} steps are charged, not {STEPS}")
        return problems

    def finish(self, folder: Path, same: bool = True, **settings: Any) -> list[str]:
        """Bring a run to its end, and say what is wrong with it."""
        if not (folder / "model.safetensors").exists():
            done = self.run(self.begin(folder, **settings), witness(self.log(folder)))
            if done.code:
                return [f"could not be resumed: {done.err.strip()[-300:]}"]
        elif (folder / "private").exists():
            self.run(["resume", folder])  # "is finished", and tidies up
        return self.wrong_end(folder, same)


def stop_after(steps: int) -> Fault:
    """SIGTERM, as `kill` sends it, after so many steps."""

    def install() -> None:
        from dpformer.fit.dpsgd import Trainer

        real = Trainer.make_step

        def counted(self: Trainer, asker: Any) -> Any:
            report = real(self, asker)
            if self.step == steps:
                os.kill(os.getpid(), signal.SIGTERM)
            return report

        Trainer.make_step = counted  # type: ignore[method-assign]

    return install


def end_is_written(folder: Path) -> bool:
    """Is the release of a run written aside, so that its checkpoints may be gone?"""
    return (folder / "private" / "release").is_dir()


def step_of(folder: Path) -> int:
    """The step of a run's newest checkpoint; -1 without one."""
    states = sorted((folder / "private").glob("checkpoint-*/state.json"))
    return int(json.loads(states[-1].read_text()).get("step", 0)) if states else -1


def can_mount() -> bool:
    """Whether small file systems can be made here."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount") is not None


def mount(folder: Path, options: str, kilobytes: int) -> bool:
    """A small file system in memory, or new options for it; False where that is not allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"{options}size={kilobytes}k", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0
