"""`dpformer reproduce`: make the results in the documentation again."""

from pathlib import Path
from typing import Annotated, Any

import typer


def reproduce(
    name: Annotated[str, typer.Argument(help="Which result: error-table, attention, transitions or whole.")],
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="A budget; give it several times for several.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of a result that is measured once.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many noise seeds, of a result that is a mean.")] = None,
    item: Annotated[str | None, typer.Option(help="Which item is held out: test (default) or validation.")] = None,
    from_ml_1m: Annotated[
        Path | None,
        typer.Option("--from-ml-1m", help="Where ratings.dat of MovieLens-1M is, instead of downloading it."),
    ] = None,
    from_games: Annotated[
        Path | None, typer.Option("--from-games", help="Where Video.txt of Amazon Games is, instead of downloading it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the figures, as JSON and page or plot.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Make a result of the documentation again."""
    import importlib
    import inspect

    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.errors import DPFormerError
    from dpformer.experiments.reproduce import RESULTS

    if name not in RESULTS:
        raise DPFormerError(f"no result is called {name!r}; there are: {', '.join(RESULTS)}")
    module = importlib.import_module(RESULTS[name])
    options: dict[str, Any] = {
        "epsilon": epsilon or None,
        "seed": seed,
        "seeds": seeds,
        "item": item,
        "from_ml_1m": from_ml_1m,
        "from_games": from_games,
    }
    given = {option: value for option, value in options.items() if value is not None}
    taken = inspect.signature(module.run).parameters
    for option in given:
        if option not in taken:
            raise DPFormerError(f"{name} has no use for --{option.replace('_', '-')}; leave it out")
    if "say" in taken:
        given["say"] = lambda line: stderr.print(line, markup=False)
    if output is not None:
        make_folder(output)
        if "out" in taken:
            given["out"] = output / f"{name}.png"
    figures = module.run(**given)
    if output is not None:
        write(output, name, figures, module)
    if as_json:
        print_json(figures)
    else:
        stdout.print(module.show(figures))


def make_folder(folder: Path) -> None:
    """Before the work: a folder that cannot be written should not show after an hour of it."""
    from dpformer.errors import DPFormerError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DPFormerError(f"{folder}: cannot be made ({error.strerror or error}); choose another with -o") from None


def write(folder: Path, name: str, figures: dict[str, Any], module: Any) -> None:
    """NAME.json, and NAME.md where the result has a page."""
    import json

    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if hasattr(module, "markdown"):
        (folder / f"{name}.md").write_text(module.markdown(figures), encoding="utf-8")
