"""`dpformer reproduce`: remake the paper's tables and figures, and our own results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpformer_experiments.reproduce.runner import Watch

# Entries of a result's figures that are written to their own file.
BESIDE = ("tried",)
STOPPING = "stopping: each training is saved after its current step"


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which result; leave it out for the list.")] = None,
    budget_minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this many minutes; cheap and informative cells run first. No limit by default."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, for a result that is a mean.", min=1)] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of a data set (ml-1m, amazon-games): its file or folder, or a prepared one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the figures: json, csv, markdown and plots.")
    ] = None,
    cells: Annotated[
        Path | None,
        typer.Option(help="Folder of the run folders, which a later command resumes; OUTPUT/cells by default."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="File with one line per finished training, which is not repeated; OUTPUT/runs.jsonl by default."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes; one per core by default.", min=1)] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="Run only this row of a table; repeat for more rows."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="For memory and throughput: the folder that `dpformer bench -o` wrote to; docs by default."),
    ] = None,
    epsilon: Annotated[list[float] | None, typer.Option("--epsilon", help="A budget; repeat for more.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, for a result that is measured once.")] = None,
    item: Annotated[str | None, typer.Option(help="Which item is held out: test (default) or validation.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Remake a table or figure of the paper, or one of our results. Ctrl-C is safe: run the same command again to continue."""
    import importlib
    import sys

    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.cli.progress import stoppable
    from dpformer.errors import DPFormerError
    from dpformer_experiments.reproduce import RESULTS
    from dpformer_experiments.reproduce.runs import FILE

    if name is None:
        _list(as_json)
        return
    if name not in RESULTS:
        raise DPFormerError(f"no result is called {name!r}; there are: {', '.join(RESULTS)}")
    module = importlib.import_module(f"dpformer_experiments.reproduce.{RESULTS[name].module}")
    taken = _taken(module)
    options: dict[str, Any] = {
        "budget_minutes": budget_minutes,
        "seeds": seeds,
        "data": data or None,
        "cells": cells,
        "runs": runs,
        "workers": workers,
        "method": method or None,
        "report": report,
        "epsilon": epsilon or None,
        "seed": seed,
        "item": item,
    }
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in taken:
            raise DPFormerError(f"{name} has no option --{option.replace('_', '-')}; leave it out")
    if "data" in given:
        from dpformer_experiments.reproduce.data_sets import parse_data

        given["data"] = parse_data(given["data"])
    if "cells" in taken:
        output = output or Path("reproduced")
        given = {"cells": output / "cells", "runs": output / FILE, **given}
    if "report" in taken:
        given.setdefault("report", Path("docs"))
    if "out" in taken:
        output = given["out"] = output or Path("docs")
    if "say" in taken:
        given["say"] = lambda line: stderr.print(line, markup=False)
    if output is not None:
        make_folder(output)
    with stoppable() as asked:
        figures = _run(module, {**RESULTS[name].options, **given}, lambda: bool(asked))
    if output is not None:
        written = module.write(figures, output) if hasattr(module, "write") else write(output, name, figures, module)
        stderr.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)
    figures = {key: value for key, value in figures.items() if key not in BESIDE}
    if as_json:
        print_json(figures)
    else:
        stdout.print(module.page(figures).table())
    if asked:
        stderr.print("stopped, everything is saved; run the same command again to continue", soft_wrap=True)
        sys.exit(130)
    if figures.get("failed"):
        sys.exit(1)


def _taken(module: Any) -> set[str]:
    """Return the options of a result: the parameters of its `run` and, if it trains, the fields of `Running`."""
    import dataclasses
    import inspect

    taken = set(inspect.signature(module.run).parameters)
    if "how" in taken:
        from dpformer_experiments.reproduce.runner import Running

        taken |= {field.name for field in dataclasses.fields(Running)}
    return taken


def _run(module: Any, given: dict[str, Any], stopped: Callable[[], bool]) -> dict[str, Any]:
    """Make the figures of a result. If it trains, the options of its cells go into one `Running`."""
    import inspect

    own = inspect.signature(module.run).parameters
    if "how" not in own:
        return module.run(**given)
    from dpformer_experiments.reproduce.runner import Running

    with show_cells() as watch:
        of_cells = {option: value for option, value in given.items() if option not in own}
        how = Running(**of_cells, watch=watch, stopped=stopped)
        return module.run(**{option: given[option] for option in given.keys() & own.keys()}, how=how)


def _list(as_json: bool) -> None:
    from dpformer.cli.output import print_json, stdout
    from dpformer_experiments.reproduce import RESULTS

    if as_json:
        print_json({name: result.about for name, result in RESULTS.items()})
        return
    for name, result in RESULTS.items():
        stdout.print(f"{name:18}  {result.about}", soft_wrap=True)


def make_folder(folder: Path) -> None:
    """Make the output folder before the work, so that an error does not come after an hour."""
    from dpformer.errors import DPFormerError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DPFormerError(
            f"{folder}: cannot be created ({error.strerror or error}); choose another with -o"
        ) from None


def write(folder: Path, name: str, figures: dict[str, Any], module: Any) -> list[Path]:
    """Write NAME.json, .csv, .md, the plot if there is one, and the log of all trainings, tried-NAME.jsonl."""
    import json

    from dpformer_experiments.reproduce.page import as_csv, save_figure
    from dpformer_experiments.reproduce.runs import read_lines

    tried = figures.get("tried", [])
    kept = {key: value for key, value in figures.items() if key not in BESIDE}
    files = {
        f"{name}.json": json.dumps(kept, indent=1, ensure_ascii=False) + "\n",
        f"{name}.csv": as_csv(kept["rows"]),
        f"{name}.md": module.page(kept).markdown(),
    }
    if tried:
        log = f"tried-{name}.jsonl"
        # Earlier lines stay in the log.
        lines = [json.dumps(line) for line in [*read_lines(folder / log), *tried]]
        files[log] = "".join(f"{line}\n" for line in dict.fromkeys(lines))
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    if hasattr(module, "draw"):
        save_figure(module.draw(kept), folder / name)
        return [folder / file for file in (*files, f"{name}.svg", f"{name}.png")]
    return [folder / file for file in files]


def show_cells() -> Any:
    """Show the progress of the cells: live bars on a terminal, else one line per cell."""
    from contextlib import contextmanager

    from dpformer.cli.output import stderr

    @contextmanager
    def shown() -> Any:
        if not stderr.is_terminal:
            yield _plain_watch()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[eta]}"), console=stderr, transient=True) as bars:
            yield _live_watch(bars)

    return shown()


def _ended(outcome: Any, left: float) -> str:
    if outcome.record is None:
        return f"{outcome.cell.label}: {outcome.why or 'stopped and saved'}"
    item = "test" if "test" in outcome.record else "validation"
    figure = 100 * outcome.record[item]["masked"]["ndcg@10"]["value"]
    return (
        f"{outcome.cell.label}: {item} NDCG@10 {figure:.2f} %, {outcome.record['core_seconds'] / 60:.1f} min; "
        f"about {left / 60:,.0f} min of estimated work left"
    )


def _plain_watch() -> Watch:
    from dpformer.cli.output import stderr
    from dpformer_experiments.reproduce.runner import Watch

    class Plain(Watch):
        def begin(self, cells: int, cached: int) -> None:
            stderr.print(f"{cells} cells, {cached} of them finished before", soft_wrap=True)

        def stopping(self) -> None:
            stderr.print(STOPPING, soft_wrap=True)

        def ended(self, outcome: Any, left: float) -> None:
            stderr.print(_ended(outcome, left), markup=False, soft_wrap=True)

    return Plain()


def _live_watch(bars: Any) -> Watch:
    from dpformer_experiments.reproduce.runner import Watch

    class Live(Watch):
        def begin(self, cells: int, cached: int) -> None:
            self.all = bars.add_task("cells", total=cells, completed=cached, eta="")
            self.tasks: dict[str, Any] = {}

        def stopping(self) -> None:
            bars.console.print(STOPPING, soft_wrap=True)

        def started(self, cell: Any) -> None:
            self.tasks[cell.label] = bars.add_task(cell.label, total=None, eta="")

        def step(self, cell: Any, step: int, steps: int) -> None:
            bars.update(self.tasks[cell.label], completed=step, total=steps)

        def ended(self, outcome: Any, left: float) -> None:
            bars.remove_task(self.tasks.pop(outcome.cell.label))
            bars.console.print(_ended(outcome, left), markup=False, soft_wrap=True)
            bars.update(self.all, advance=outcome.record is not None, eta=f"about {left / 60:,.0f} min left")

    return Live()
