"""`dpformer bench`: measure speed and memory on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    name: Annotated[
        str,
        typer.Argument(help="Which benchmark: training, models, prepare, noise, grouping, latency or ranks."),
    ] = "training",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller measurements.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the report: figures as JSON, a page, plots.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Measure speed and memory on this machine.

    The training benchmark compares private training with ordinary training and other libraries; it takes about 15 minutes on two
    cores, and less than 5 with --quick.
    """
    import importlib
    import inspect

    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.errors import DPFormerError
    from dpformer_experiments.bench import BENCHMARKS
    from dpformer_experiments.cli.reproduce import make_folder

    if name not in BENCHMARKS:
        raise DPFormerError(f"no benchmark is called {name!r}; there are: {', '.join(BENCHMARKS)}")
    if output is not None:
        make_folder(output)
    module = importlib.import_module(BENCHMARKS[name])
    given: dict[str, Any] = {}
    if "say" in inspect.signature(module.run).parameters:
        given["say"] = lambda line: stderr.print(f"{line} ...", markup=False)
    figures = module.run(quick, **given)
    if output is not None:
        write(output, name, figures, module)
    if as_json:
        print_json(figures)
    else:
        stdout.print(module.show(figures))


def write(folder: Path, name: str, figures: dict[str, Any], module: Any) -> None:
    """Write the figures, and the page and plots if a benchmark has them. One with a `PART` adds to an existing page."""
    import json

    from dpformer_experiments.bench import training

    page = folder / "performance.json"
    if hasattr(module, "PART") and page.is_file():
        figures = json.loads(page.read_text(encoding="utf-8")) | {module.PART: figures}
        module = training
    name = "performance" if hasattr(module, "plot") else f"bench-{name}"
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if hasattr(module, "plot"):
        module.plot(figures, folder)
        (folder / f"{name}.md").write_text(module.markdown(figures), encoding="utf-8")
