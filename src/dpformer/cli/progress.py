"""A run on the screen: how far it is, and how it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.fit.run import Progress
    from dpformer.fit.session import AnyRun


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one stops at once, at the last checkpoint."""
    import signal

    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def show_progress(run: AnyRun, quiet: bool) -> Iterator[Any]:
    """A live line on a terminal, a plain line now and then elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from dpformer.cli.output import stderr
    from dpformer.privacy.plan import spending

    plan = run.plan
    if quiet or not plan.steps:
        yield lambda progress: None
        return
    spent = spending(plan)
    if not stderr.is_terminal:
        every = max(1, plan.steps // 10)

        def plain(progress: Progress) -> None:
            if progress.report.step % every == 0 or progress.report.step == plan.steps:
                stderr.print(f"step {progress.report.step}/{plan.steps}  {_line(progress, spent)}", soft_wrap=True)

        yield plain
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("", total=plan.steps, completed=run.step)
        yield lambda progress: bar.update(task, completed=progress.report.step, description=_line(progress, spent))


def _line(progress: Progress, spent: dict[int, float]) -> str:
    report, plan = progress.report, progress.plan
    epoch = report.step * plan.batch_size / plan.users
    budget = (
        f"epsilon {spent[min(s for s in spent if s >= report.step)]:.2f} of {plan.epsilon:g}"
        if plan.private
        else "not private"
    )
    return f"epoch {epoch:.1f}  {progress.speed:,.0f} users/s  {budget}  loss {report.loss:.3f} (not private)"
