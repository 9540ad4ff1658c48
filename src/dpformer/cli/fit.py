"""`dpformer fit` and `dpformer resume`: private training that can be stopped at any time, by one process or several."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpformer.errors import DPFormerError
    from dpformer.fit.distributed.ranks import Ranks
    from dpformer.fit.events import Tracker
    from dpformer.fit.run import Run
    from dpformer.privacy import PrivacyStatement

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]
Board = Annotated[
    Path | None, typer.Option("--tensorboard", help="Write a TensorBoard log to this folder; losses are not private.")
]
Timeout = Annotated[
    float,
    typer.Option(min=1, help="Under torchrun: how many seconds rank 0 waits for another process before the run ends."),
]


def fit(
    data: Annotated[Path, typer.Argument(help="A folder made by `dpformer prepare`.")],
    run: Annotated[Path, typer.Option("--run", "-o", help="Folder of the run; must be new. Under torchrun: -o.")],
    epsilon: Annotated[float | None, typer.Option(help="The budget; inf trains without privacy.")] = None,
    delta: Annotated[float | None, typer.Option(help="Must be below 1 / users.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The network: transformer, gru or lstm."),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="default, pure (DP-SGD alone), whole (with statistics), paper; transitions, popularity (no network)."
        ),
    ] = "default",
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting, as name=value; repeat for more. See docs/training.md."),
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(
            help="A public number of users for rate and delta, at least the number in the data (the default)."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Noise from a given seed, which anyone can subtract: research only, marked insecure."),
    ] = None,
    noise: Annotated[str | None, typer.Option(hidden=True)] = None,
    split_items: Annotated[bool, typer.Option("--split-items", hidden=True)] = False,
    timeout: Timeout = 1800,
    tensorboard: Board = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with user-level differential privacy. Ctrl-C is safe: `dpformer resume` goes on.

    On several processes or machines: torchrun --nproc-per-node 2 -m dpformer fit DATA -o RUN (torchrun takes --run for its own).
    """
    from dpformer.fit.distributed.lead_and_follow import finished
    from dpformer.fit.presets import make_recipe
    from dpformer.fit.run import start

    if split_items:
        raise _no_split_items()
    flags = {"epsilon": epsilon, "delta": delta, "model": model, "population": population, "seed": seed, "noise": noise}
    options = {key: value for key, value in flags.items() if value is not None} | _settings(setting or [])
    with _joined(timeout) as ranks:
        if not ranks.first:
            _follow(ranks, data, run)
            return
        with ranks.leading():
            recipe, trackers = make_recipe(preset, config, **options), _trackers(tensorboard)
        if finished(run, ranks, resuming=False):
            _show_finished(run, as_json)
            return
        if ranks.size > 1 and not recipe.steps_on_data and not quiet:
            _say_alone(ranks.size)
        _train(start(run, data, recipe, ranks), trackers, quiet, as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    data: Annotated[Path | None, typer.Option(help="Where the data is now, if it was moved.")] = None,
    timeout: Timeout = 1800,
    tensorboard: Board = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was interrupted, exactly where an uninterrupted one would be. Also under torchrun, see `fit`."""
    from dpformer.fit.distributed.lead_and_follow import finished
    from dpformer.fit.run import resume as resume_run

    with _joined(timeout) as ranks:
        if not ranks.first:
            _follow(ranks, data, run)
            return
        with ranks.leading():
            trackers = _trackers(tensorboard)
        if finished(run, ranks):
            _show_finished(run, as_json)
            return
        _train(resume_run(run, data, ranks), trackers, quiet, as_json)


@contextmanager
def _joined(timeout: float) -> Iterator[Ranks]:
    """This process among those that torchrun started; an error says whose it is, and is told once."""
    import signal

    from dpformer.errors import DPFormerError, RankError
    from dpformer.fit.distributed.ranks import LeaderError, join

    with join(timeout) as ranks:
        try:
            yield ranks
        except LeaderError:
            sys.exit(2)
        except DPFormerError as error:
            # torchrun ends the other processes: not before this one has said why.
            if ranks.first or isinstance(error, RankError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise
            raise type(error)(f"rank {ranks.rank}: {error}") from None


def _follow(ranks: Ranks, data: Path | None, run: Path) -> None:
    """The part of a process that does not lead: it makes the steps, and says and writes nothing."""
    from dpformer.cli.progress import stoppable
    from dpformer.errors import RankError
    from dpformer.fit.distributed.lead_and_follow import follow
    from dpformer.fit.distributed.ranks import LeaderError

    try:
        with stoppable() as asked:
            follower = follow(ranks, data)
            if bool(asked) if follower is None else not follower.train(lambda: bool(asked)):
                sys.exit(130)
    except LeaderError:
        raise
    except RankError as error:  # rank 0 may have ended, and cannot say it itself
        raise RankError(f"{error}. If rank 0 does not say why, go on {_way_on(run, ranks.size)}") from None


def _no_split_items() -> DPFormerError:
    from dpformer.errors import DPFormerError

    return DPFormerError(
        "--split-items was removed: every preset but `paper` learns 1,000 to 1,500 items, a table that fits any process. "
        "Leave it out; if the table is too large, lower it with --set vocabulary=1500"
    )


def _say_alone(processes: int) -> None:
    from dpformer.cli.output import stderr

    stderr.print(
        f"{processes} processes, and no steps to share out: one of them makes all of it, and the others end. Presets with steps: "
        "pure, whole, paper",
        soft_wrap=True,
    )


def _way_on(run: Path, processes: int) -> str:
    """How to go on with a run of so many processes."""
    more = ", or under torchrun with any number of processes" if processes > 1 else ""
    return f"with: dpformer resume {run}{more}"


def _trackers(tensorboard: Path | None) -> list[Tracker]:
    """Made before anything is spent, so that a missing package is no loss."""
    from dpformer.cli.output import stderr
    from dpformer.fit.events import TensorBoard

    if tensorboard is None:
        return []
    made: list[Tracker] = [TensorBoard(tensorboard)]
    stderr.print(
        f"TensorBoard log in {tensorboard}: what stands under `not private/` is not to be published", soft_wrap=True
    )
    return made


def _settings(pairs: list[str]) -> dict[str, Any]:
    import json

    from dpformer.errors import DPFormerError

    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise DPFormerError(f"--set {pair!r} is not name=value")
        try:
            settings[key.strip().replace("-", "_")] = json.loads(text)
        except ValueError:
            settings[key.strip().replace("-", "_")] = text
    return settings


def _train(run: Run, trackers: list[Tracker], quiet: bool, as_json: bool) -> None:
    from dpformer.cli.output import stderr
    from dpformer.cli.progress import show_progress, stoppable

    plan = run.plan
    if not quiet:
        budget = f"epsilon {plan.epsilon:g}, delta {plan.delta:g}" if plan.private else "NOT PRIVATE (epsilon inf)"
        work = f"{plan.steps} steps of {plan.batch_size:,} users expected, noise multiplier {plan.noise_multiplier:.3f}"
        if not plan.steps:
            work = f"{len(plan.releases)} releases, no steps"
        stderr.print(f"{plan.users:,} users, {len(run.dataset.catalogue):,} items; {budget}; {work}", soft_wrap=True)
    try:
        with stoppable() as asked, show_progress(run, quiet) as on_progress:
            done = run.train(on_progress, lambda: bool(asked), trackers=trackers)
    except KeyboardInterrupt:
        stderr.print(
            f"stopped at once; go on from the last checkpoint {_way_on(run.folder, run.ranks.size)}", soft_wrap=True
        )
        sys.exit(130)
    finally:
        run.close()
    if not done:
        way = _way_on(run.folder, run.ranks.size)
        where = f"after step {run.step}" if run.step else "before the first step"
        stderr.print(f"stopped and saved {where}; go on {way}", soft_wrap=True)
        sys.exit(130)
    _show(run.folder, run.statement(), as_json)


def _show_finished(folder: Path, as_json: bool) -> None:
    """After a crash or a restart that came when all was done but for the last files."""
    from dpformer.artifact import read_statement
    from dpformer.cli.output import stderr

    stderr.print(f"{folder}: is finished; its model is released", soft_wrap=True)
    _show(folder, read_statement(folder), as_json)


def _show(folder: Path, statement: PrivacyStatement, as_json: bool) -> None:
    from dpformer.cli.output import print_json, stderr, stdout

    if as_json:
        import json

        steps = statement.steps.planned if statement.steps else 0
        print_json({"run": str(folder), "steps": steps, "privacy": json.loads(statement.to_json())})
        return
    stdout.print(statement.text(), markup=False, soft_wrap=True)
    stderr.print(f"released in {folder}: evaluate it with `dpformer evaluate {folder}`", soft_wrap=True)
