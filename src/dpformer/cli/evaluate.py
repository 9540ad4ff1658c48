"""`dpformer evaluate`: how well released models rank what people did next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from dpformer.cli.options import AsJson
from dpformer.cli.output import print_json, say, stdout, threads
from dpformer.cli.progress import counting
from dpformer.errors import DPFormerError

if TYPE_CHECKING:
    import numpy as np

    from dpformer.artifact import Artifact
    from dpformer.data import Dataset
    from dpformer.evaluation import Evaluation, Figure


def evaluate(
    runs: Annotated[list[Path], Argument(help="Folders of finished runs; several are compared with the first.")],
    data: Annotated[
        Path | None, Option(help="A prepared folder of the same items; the one it was trained on by default.")
    ] = None,
    item: Annotated[str, Option("--item", help="Which item is held out: test or validation.")] = "test",
    k: Annotated[int, Option("--k", "-k", min=1, help="Items at the top that count.")] = 10,
    sample: Annotated[
        int | None, Option(min=1, help="Evaluate so many users, drawn uniformly; the protocol line says so.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank all items for all users and write metrics.json. Figures are computed on people's data: they are not private."""
    from dpformer.artifact import load as load_artifact
    from dpformer.artifact.layout import METRICS
    from dpformer.data import load
    from dpformer.data.store import MANIFEST
    from dpformer.evaluation import difference, held_out
    from dpformer.evaluation import evaluate as evaluate_model
    from dpformer.evaluation.metrics import CUTOFFS
    from dpformer.fit.scorers import count_events

    if len(runs) > 1 and data is None and (runs[-1] / MANIFEST).exists():
        raise DPFormerError(f"{runs[-1]}: is a prepared folder; give it as --data {runs[-1]}")
    models = {run: load_artifact(run) for run in runs}
    folders = {run: data or _recorded(run) for run in runs}
    folder = folders[runs[0]]
    if folder is None:
        cure = f"run: dpformer evaluate {runs[0]} --data DATA"
        raise DPFormerError(f"{runs[0]}: does not record where its data is; {cure}")
    if set(folders.values()) != {folder}:
        raise DPFormerError("the runs were trained on different data; pass --data DATA to compare them on")
    dataset = load(folder)
    for run, model in models.items():
        _refuse_seen(run, model, item, folder, dataset)
    held = held_out(dataset.sequences, item)
    how: dict[str, Any] = {"cutoffs": (*CUTOFFS, k), "sample": sample}
    evaluations: dict[str, Evaluation] = {}
    for run, model in models.items():
        numbered = held.renumbered(_numbers(run, model, dataset, folder))
        with counting("people", len(held.evaluated)) as done:
            how_fast: dict[str, Any] = {"on_progress": done, "threads": threads()}
            evaluations[str(run)] = evaluate_model(model, numbered, model.item_count, **how, **how_fast)
    items = len(dataset.catalogue)
    popular = evaluate_model(count_events(held.histories, items), held, items, **how)
    first, *others = evaluations
    differences = {
        name: difference(evaluations[name].ranks, evaluations[first].ranks, cutoffs=how["cutoffs"]) for name in others
    }
    shown: dict[str, Any] = {name: one.figures() for name, one in evaluations.items()}
    others_data = [str(run) for run in runs if _recorded(run) not in (None, folder.resolve())]
    for run in runs:
        shown[str(run)]["popularity"] = popular.figures()["masked"]
        if str(run) not in others_data:
            _keep(run / METRICS, item, shown[str(run)])
    if as_json:
        paired = {name: {key: asdict(one) for key, one in each.items()} for name, each in differences.items()}
        print_json(shown[first] if not others else {"runs": shown, "difference": paired})
        return
    name = models[runs[0]].model.spec.name
    title = f"{name}, {item} item" if not others else f"{item} item, seen masked"
    stdout.print(table(title, evaluations, popular, differences, k))
    kept = f"; written to {METRICS} of each run" if not others_data else ""
    say(f"computed on people's data without noise: not private{kept}")
    if others_data:
        say(f"{METRICS} is for the data that a run was fitted on, so it was not written for: {', '.join(others_data)}")


def table(
    title: str,
    evaluations: dict[str, Evaluation],
    popular: Evaluation,
    differences: dict[str, dict[str, Figure]] | None = None,
    k: int = 10,
) -> Table:
    """The figures at k, in percent, with their intervals; the others are in metrics.json."""
    first = next(iter(evaluations))
    metrics = [f"ndcg@{k}", f"hit@{k}"]
    protocol = evaluations[first].protocol.line()
    shown = Table("", *map(str.upper, metrics), title=title, caption=protocol, caption_justify="left")
    if differences:
        rows = {name: one.masked for name, one in evaluations.items()}
        rows |= {f"{name} minus {first}": figures for name, figures in differences.items()}
    else:
        one = evaluations[first]
        rows = {"seen masked": one.masked, "unmasked": one.unmasked}
        rows |= {f"{name} targets ({part.users:,})": part.metrics for name, part in one.slices.items()}
    for name, figures in (rows | {"popularity, counted without noise": popular.masked}).items():
        row = (figures[key] for key in metrics)
        shown.add_row(name, *(f"{100 * f.value:.2f}  [{100 * f.low:.2f}, {100 * f.high:.2f}]" for f in row))
    return shown


def _recorded(run: Path) -> Path | None:
    """Where the data of a run was, if it records that."""
    from dpformer.artifact.layout import LOCAL
    from dpformer.files import read_json

    if not (run / LOCAL).exists():
        return None
    local = read_json(run / LOCAL)
    if not isinstance(local, dict) or not isinstance(local.get("data"), str):
        raise DPFormerError(f"{run / LOCAL}: is damaged; delete it, and run: dpformer evaluate {run} --data DATA")
    return Path(local["data"]).resolve()


def _refuse_seen(run: Path, model: Artifact, item: str, folder: Path, dataset: Dataset) -> None:
    """Refuse an item that the model was trained on. What another log holds is not known here: that is said."""
    hold_out = str(model.recipe.get("hold_out"))
    seen = {"validation": (), "test": ("validation",), "nothing": ("validation", "test")}.get(hold_out)
    if seen is None:
        raise DPFormerError(f"{run}: config.json does not say what training held out; copy the released folder again")
    elsewhere = _recorded(run) not in (None, folder.resolve())
    split = dataset.sequences.split
    other_split = elsewhere and model.log.get("date") != (None if split is None else split.date)
    if item not in seen and not other_split:
        return
    if elsewhere:
        how = " on another split" if other_split else ""
        count = f"the figures count if none of the events held out of {folder} were in its log"
        say(f"{run}: was trained with hold_out {hold_out!r}{how}; {count}")
        return
    cure = f"fit with --set hold_out={item}" if item == "validation" else f"a run with hold_out={item}"
    other = "on the test item, or " if hold_out == "test" else ""
    raise DPFormerError(
        f"{run}: was trained with hold_out {hold_out!r}, so that it has seen the {item} item; evaluate {other}{cure}"
    )


def _numbers(run: Path, model: Artifact, dataset: Dataset, folder: Path) -> np.ndarray:
    """The numbers of the data's items in the model's catalogue; those that are missing are said."""
    numbers = dataset.numbers_in(model.catalogue)
    missing = int((numbers[1:] == 0).sum())
    if missing == len(dataset.catalogue):
        cure = "evaluate on the data it was made for"
        raise DPFormerError(f"{folder}: has no item in common with the model in {run}; {cure}")
    if missing:
        say(
            f"{missing:,} of {len(dataset.catalogue):,} items of {folder} are not in the catalogue of {run}: they are left out "
            "of histories, and missed where they are the item held out"
        )
    return numbers


def _keep(path: Path, item: str, figures: dict[str, Any]) -> None:
    """Write the figures of an item beside those of others."""
    from dpformer.files import read_json, write_json

    written = read_json(path) if path.exists() else {"not_private": True}
    if not isinstance(written, dict):
        raise DPFormerError(f"{path}: is damaged; delete it and evaluate again")
    write_json(path, written | {item: figures}, mode=0o600)
