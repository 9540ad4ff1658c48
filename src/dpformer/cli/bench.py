"""`dpformer bench`: measure speed and memory on this machine."""

from typing import Annotated, Any

import typer


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Which benchmarks; all of them by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: minutes become seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Measure speed and memory on this machine."""
    import importlib

    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.errors import DPFormerError
    from dpformer.experiments.bench import BENCHMARKS

    chosen = names or list(BENCHMARKS)
    for name in chosen:
        if name not in BENCHMARKS:
            raise DPFormerError(f"no benchmark is called {name!r}; there are: {', '.join(BENCHMARKS)}")
    figures: dict[str, Any] = {}
    for name in chosen:
        stderr.print(f"benchmark {name} ...")
        module = importlib.import_module(BENCHMARKS[name])
        figures[name] = module.run(quick)
        if not as_json:
            stdout.print(module.show(figures[name]))
    if as_json:
        print_json(figures)
