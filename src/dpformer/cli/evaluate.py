"""`dpformer evaluate`: how well a released model ranks what people did next."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dpformer.evaluation import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    data: Annotated[
        Path | None, typer.Argument(help="A prepared folder of the same items; the one it was trained on by default.")
    ] = None,
    item: Annotated[str, typer.Option("--item", help="Which item is held out: test or validation.")] = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Rank all items for all users and write metrics.json. Figures are computed on people's data: they are not private."""
    from dpformer.artifact import load as load_artifact
    from dpformer.artifact.layout import LOCAL, METRICS
    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.data import load
    from dpformer.errors import DPFormerError
    from dpformer.evaluation import evaluate as evaluate_model
    from dpformer.evaluation import held_out
    from dpformer.files import read_json, write_json

    model = load_artifact(run)
    if data is None:
        if not (run / LOCAL).exists():
            raise DPFormerError(f"{run}: does not record where its data is; run: dpformer evaluate {run} DATA")
        local = read_json(run / LOCAL)
        if not isinstance(local, dict) or not isinstance(local.get("data"), str):
            raise DPFormerError(f"{run / LOCAL}: is damaged; run: dpformer evaluate {run} DATA")
        data = Path(local["data"])
    dataset = load(data)
    numbers = dataset.numbers_in(model.catalogue)
    missing = int((numbers[1:] == 0).sum())
    if missing == len(dataset.catalogue):
        raise DPFormerError(
            f"{data}: has no item in common with the model in {run}; evaluate on the data it was made for"
        )
    if missing:
        stderr.print(
            f"{missing:,} of {len(dataset.catalogue):,} items of {data} are not in the model's catalogue: they are left out of "
            "histories, and missed where they are the item held out",
            soft_wrap=True,
        )
    hold_out = model.recipe.get("hold_out")
    seen = {"validation": (), "test": ("validation",), "nothing": ("validation", "test")}.get(str(hold_out))
    if seen is None:
        raise DPFormerError(f"{run}: config.json does not say what training held out; copy the released folder again")
    if item in seen:
        raise DPFormerError(
            f"{run}: was trained with hold_out {hold_out!r}, so that it has seen the {item} item; evaluate "
            + (
                f"on the test item, or fit with --set hold_out={item}"
                if item == "validation"
                else f"a run with hold_out={item}"
            )
        )
    with stderr.status("ranking all items for all users ..."):
        held = held_out(dataset.sequences, item).renumbered(numbers)
        evaluation = evaluate_model(model, held, len(model.catalogue))
    figures: dict[str, Any] = evaluation.figures()
    path = run / METRICS
    written = read_json(path) if path.exists() else {"not_private": True}
    if not isinstance(written, dict):
        raise DPFormerError(f"{path}: is damaged; delete it and evaluate again")
    write_json(path, written | {item: figures}, mode=0o600)
    if as_json:
        print_json(figures)
        return
    stdout.print(table(f"{model.model.spec.name}, {item} item", evaluation))
    stderr.print(f"written to {path}; computed on people's data without noise: not private", soft_wrap=True)


def table(title: str, evaluation: "Evaluation") -> "Table":
    """The figures at 10, in percent, with their intervals; the others are in metrics.json."""
    from rich.table import Table

    from dpformer.evaluation import HEADLINE

    shown = Table(
        "",
        *(name.upper() for name in HEADLINE),
        title=title,
        caption=evaluation.protocol.line(),
        caption_justify="left",
    )
    rows = {"seen masked": evaluation.masked, "unmasked": evaluation.unmasked}
    rows |= {f"{name} targets ({part.users:,})": part.metrics for name, part in evaluation.slices.items()}
    for name, metrics in rows.items():
        figures = (metrics[key] for key in HEADLINE)
        shown.add_row(name, *(f"{100 * f.value:.2f}  [{100 * f.low:.2f}, {100 * f.high:.2f}]" for f in figures))
    return shown
