"""`dpformer fit` and `dpformer resume`: private training that can be stopped at any time, by one process or several."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dpformer.cli import output as screen
from dpformer.cli.options import AccountFolder, AsJson, Quiet, account_of, chooses_recipe
from dpformer.cli.output import print_json, say
from dpformer.cli.progress import show_progress, stoppable
from dpformer.errors import DPFormerError, RankError

if TYPE_CHECKING:
    from dpformer.fit.run import Run
    from dpformer.fit.stage import Progress
    from dpformer.fit.trackers import Tracker
    from dpformer.privacy import PrivacyStatement
    from dpformer.training.ranks import Ranks

Board = Annotated[
    Path | None, Option("--tensorboard", help="Write a TensorBoard log to this folder; losses are not private.")
]
Timeout = Annotated[
    float, Option(min=1, help="Under torchrun: how many seconds rank 0 waits for another process before the run ends.")
]
Device = Annotated[str, Option(help="auto, cpu or cuda, for steps by one process; a GPU is untested.")]


@chooses_recipe
def fit(
    data: Annotated[Path, Argument(help="A folder made by `dpformer prepare`.")],
    run: Annotated[
        Path | None, Option("--run", "-o", help="Folder of the run; must be new. Under torchrun: -o.")
    ] = None,
    account: AccountFolder = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan and end; as `dpformer plan`.")] = False,
    device: Device = "auto",
    timeout: Timeout = 1800,
    tensorboard: Board = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    *,
    recipe: functools.partial[Any],
) -> None:
    """Train a model with user-level differential privacy. Ctrl-C is safe: `dpformer resume` goes on.

    On several processes or machines: torchrun --nproc-per-node 2 -m dpformer fit DATA -o RUN (torchrun takes --run for its own).
    """
    from dpformer.cli.plan import planned
    from dpformer.cli.plan import show as show_plan
    from dpformer.fit.run import start

    if dry_run:
        show_plan(planned(recipe(), data, account_of(account)), as_json)
        return
    if run is None:
        raise DPFormerError("the run needs a folder: give --run FOLDER, or --dry-run to see the plan")
    with _joined(timeout, device) as ranks:
        if not ranks.first:
            _follow(ranks, data, run)
            return
        chosen, trackers = recipe(), _trackers(tensorboard)
        people = account_of(account)
        if ranks.size > 1 and not chosen.steps_on_data and not quiet:
            say(
                f"{ranks.size} processes, and no steps to share out: one of them makes all of it, and the others end. Presets "
                "with steps: default, dpformer, paper"
            )
        train(start(run, data, chosen, ranks, account=people), trackers, quiet, as_json)


def resume(
    run: Annotated[Path, Argument(help="Folder of the run.")],
    data: Annotated[Path | None, Option(help="Where the data is now, if it was moved.")] = None,
    device: Device = "auto",
    timeout: Timeout = 1800,
    tensorboard: Board = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was interrupted, exactly where an uninterrupted one would be. Also under torchrun, see `fit`."""
    from dpformer.artifact import read_statement
    from dpformer.fit.lead_and_follow import finished
    from dpformer.fit.run import resume as resume_run

    with _joined(timeout, device) as ranks:
        if not ranks.first:
            _follow(ranks, data, run)
            return
        trackers = _trackers(tensorboard)
        if finished(run, ranks):
            say(f"{run}: is finished; its model is released")
            _show(run, read_statement(run), as_json)
            return
        train(resume_run(run, data, ranks), trackers, quiet, as_json)


@contextmanager
def _joined(timeout: float, device: str) -> Iterator[Ranks]:
    """This process among those that torchrun started; an error says whose it is, and is told once."""
    from dpformer.training.ranks import LeaderError, join

    with join(timeout, device=device) as ranks:
        try:
            yield ranks
        except LeaderError:
            sys.exit(2)
        except DPFormerError as error:
            # torchrun ends the other processes: not before this one has said why.
            if ranks.first or isinstance(error, RankError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise
            raise type(error)(f"rank {ranks.rank}: {error.typed}") from None


def _follow(ranks: Ranks, data: Path | None, run: Path) -> None:
    """The part of a process that does not lead: it makes the steps, and says and writes nothing."""
    from dpformer.fit.lead_and_follow import follow
    from dpformer.training.ranks import LeaderError

    try:
        with stoppable() as asked:
            follower = follow(ranks, data)
            if bool(asked) if follower is None else not follower.train(lambda: bool(asked)):
                sys.exit(130)
    except LeaderError:
        raise
    except RankError as error:  # rank 0 may have ended, and cannot say it itself
        raise RankError(f"{error}. If rank 0 does not say why, go on {_way_on(run, ranks.size)}") from None


def _way_on(run: Path, processes: int) -> str:
    """How to go on with a run of so many processes."""
    more = ", or under torchrun with any number of processes" if processes > 1 else ""
    return f"with: dpformer resume {run}{more}"


def _trackers(tensorboard: Path | None) -> list[Tracker]:
    """Made before anything is spent, so that a missing package is no loss."""
    from dpformer.fit.trackers import TensorBoard

    if tensorboard is None:
        return []
    made: list[Tracker] = [TensorBoard(tensorboard)]
    say(f"TensorBoard log in {tensorboard}: what stands under `not private/` is not to be published")
    return made


def train(run: Run, trackers: list[Tracker], quiet: bool, as_json: bool) -> None:
    """Train with progress until the model is released or a signal stops it, and print the statement."""
    plan, way = run.plan, _way_on(run.folder, run.ranks.size)
    if not quiet:
        budget = f"epsilon {plan.epsilon:g}, delta {plan.delta:g}" if plan.private else "NOT PRIVATE (epsilon inf)"
        work = f"{plan.steps} steps of {plan.batch_size:,} users expected, noise multiplier {plan.noise_multiplier:.3f}"
        if not plan.steps:
            work = f"{len(plan.releases)} releases, no steps"
        say(f"{plan.users:,} users, {len(run.dataset.catalogue):,} items; {budget}; {work}")
    try:
        with stoppable() as asked, show_progress(plan, quiet) as on_progress:

            def watch(progress: Progress) -> None:
                if progress.warning:
                    say(f"warning: {progress.warning}")
                on_progress(progress)

            done = run.train(watch, lambda: bool(asked), trackers=trackers)
    except KeyboardInterrupt:
        say(f"stopped at once; go on from the last checkpoint {way}")
        sys.exit(130)
    finally:
        run.close()
    if not done:
        say(f"stopped and saved {f'after step {run.step}' if run.step else 'before the first step'}; go on {way}")
        sys.exit(130)
    _show(run.folder, run.statement(), as_json)


def _show(folder: Path, statement: PrivacyStatement, as_json: bool) -> None:
    from dpformer.artifact import read_config
    from dpformer.artifact.card import evaluated

    if as_json:
        steps = statement.steps.planned if statement.steps else 0
        print_json({"run": str(folder), "steps": steps, "privacy": statement.model_dump(mode="json")})
        return
    screen.show(statement.text())
    way = f"evaluate it with `dpformer evaluate {folder}`"
    if not evaluated(read_config(folder)):
        way = "nothing was held out to evaluate it on; use it with `dpformer recommend`"
    say(f"released in {folder}: {way}")
