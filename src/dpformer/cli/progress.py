"""A run on the screen: how far it is, and how it is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dpformer.cli.output import say, stderr

if TYPE_CHECKING:
    from dpformer.fit.stage import Progress
    from dpformer.privacy import PrivacyPlan

# Seconds before plain lines begin.
PLAIN_AFTER = 10.0
TITLES = {"histogram": "histogram", "transitions": "transitions", "distil": "distillation", "dpsgd": "step"}


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask to stop after the step; a second one stops at once, at the last checkpoint."""
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
def show_progress(plan: PrivacyPlan, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Live bars on a terminal and in a notebook, a plain line now and then elsewhere."""
    from dpformer.privacy.plan import spending

    if quiet:
        yield lambda progress: None
        return
    spent = spending(plan) if plan.steps else {}
    notebook = Console()
    if not stderr.is_terminal and not notebook.is_jupyter:

        def plain(progress: Progress) -> None:
            every = max(1, progress.total // 10)
            if progress.done and (progress.done == progress.total or progress.done % every == 0):
                say(f"{TITLES[progress.stage]} {progress.done}/{progress.total}{_line(progress, spent)}")

        yield plain
        return
    before, after = (TextColumn("{task.description}"), MofNCompleteColumn()), TextColumn("{task.fields[line]}")
    columns, there = (*before, BarColumn(), after, TimeRemainingColumn()), notebook.is_jupyter
    with Bar(*columns, console=notebook if there else stderr, transient=not there) as bar:
        tasks: dict[str, Any] = {}

        def live(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(TITLES[progress.stage], total=progress.total, line="")
            task, line = tasks[progress.stage], _line(progress, spent)
            bar.update(task, completed=progress.done, total=progress.total, line=line)

        yield live


@contextmanager
def counting(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a plain line at each tenth elsewhere (none for short work); call it with how many are done."""
    if stderr.is_terminal:
        with Bar(console=stderr, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    began, tenth = time.monotonic(), 0

    def plain(done: int) -> None:
        nonlocal tenth
        if time.monotonic() - began > PLAIN_AFTER and 10 * done // max(total, 1) > tenth:
            tenth = 10 * done // max(total, 1)
            say(f"{title} {done:,}/{total:,}")

    yield plain


def _line(progress: Progress, spent: dict[int, float]) -> str:
    report, plan = progress.report, progress.plan
    if report is None:
        return ""
    epoch = progress.done * plan.batch_size / plan.users
    budget = "not private"
    if plan.private:
        budget = f"epsilon {spent[min(s for s in spent if s >= progress.done)]:.2f} of {plan.epsilon:g}"
    return f"  epoch {epoch:.1f}  {progress.speed:,.0f} users/s  {budget}  loss {report.mean_loss:.3f} (not private)"
