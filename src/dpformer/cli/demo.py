"""`dpformer demo`: the whole way, on data that the package brings along."""

import shutil
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from dpformer.cli import output as screen
from dpformer.cli.evaluate import table as figures_table
from dpformer.cli.options import AsJson
from dpformer.cli.output import print_json, say, stderr, stdout
from dpformer.cli.prepare import statistics_table
from dpformer.cli.progress import show_progress
from dpformer.errors import DPFormerError

_NOT_PRIVATE = "* computed on people's data without noise, to look at: not private"


def demo(
    output: Annotated[Path, Option("-o", "--output", help="Folder to write.")] = Path("demo-output"),
    epsilon: Annotated[float, Option(help="The budget.")] = 8.0,
    as_json: AsJson = False,
) -> None:
    """Prepare the embedded data, train privately (the default, DP-SGD alone, statistics alone), evaluate, recommend, report."""
    from dpformer.artifact import load as load_artifact
    from dpformer.cli.demo_steps import Watched
    from dpformer.data import load, prepare_named, save, statistics
    from dpformer.data.named import DEMO
    from dpformer.evaluation import Scorer, evaluate, held_out
    from dpformer.files import write_file, write_json
    from dpformer.fit.presets import make_recipe
    from dpformer.fit.run import start
    from dpformer.fit.scorers import count_events
    from dpformer.report import make_report

    data = output / "data"
    if output.exists():
        if not (data / "manifest.json").exists():
            raise DPFormerError(f"{output}: exists and was not written by the demo; choose another with -o")
        shutil.rmtree(output)
    stderr.rule("1. a log becomes sequences")
    save(prepare_named(DEMO), data)
    dataset = load(data)
    if not as_json:
        stdout.print(statistics_table(statistics(dataset)))
    stderr.rule("2. private training, in three ways")
    folders = {"default": output / "run", "dpformer": output / "dpformer", "transitions": output / "transitions"}
    did: dict[str, dict[str, Any]] = {}
    # Runs of their own, with ledgers of their own: three budgets of epsilon, to compare them.
    for preset, place in folders.items():
        run = start(place, data, make_recipe(preset, epsilon=epsilon))
        with show_progress(run.plan, quiet=preset == "transitions") as on_progress:
            watched = Watched(on_progress)
            run.train(watched)
        did[preset] = {"releases": len(run.statement().releases), **(watched.did(run) if run.plan.steps else {})}
        did[preset]["epsilon"] = run.statement().epsilon
        run.close()
    stderr.rule("3. how good are they?")
    folder = folders["default"]
    model = load_artifact(folder)
    held, items = held_out(dataset.sequences, "test"), len(dataset.catalogue)
    contenders: dict[str, Scorer] = {name: load_artifact(place) for name, place in folders.items()}
    contenders["popularity, not private"] = count_events(dataset.train("validation"), items)
    evaluations = {name: evaluate(it, held, items) for name, it in contenders.items()}
    for name, place in folders.items():
        write_json(place / "metrics.json", {"not_private": True, "test": evaluations[name].figures()}, 0o600)
    write_file(output / "report.html", make_report([folder, folders["dpformer"]]).html.encode(), 0o600)
    if as_json:
        figures = {name: {key: f.value for key, f in one.masked.items()} for name, one in evaluations.items()}
        privacy = model.statement.model_dump(mode="json")
        print_json({**statistics(dataset), "test": figures, "did": did, "privacy": privacy, "output": str(output)})
        return
    comparison = Table("", "NDCG@10", "HIT@10", title="test item, seen items masked, in percent", title_justify="left")
    for name, one in evaluations.items():
        label = name if name not in folders else f"preset {name}, epsilon {epsilon:g}"
        comparison.add_row(label, *(f"{100 * one.masked[key].value:.1f}" for key in ("ndcg@10", "hit@10")))
    stdout.print(comparison)
    stdout.print(did_table(did), _NOT_PRIVATE)
    counted = evaluations["popularity, not private"]
    stdout.print(figures_table("the default in detail", {"default": evaluations["default"]}, counted))
    stderr.rule("4. recommendations for people it has never seen")
    names = dataset.names()
    samples = Table("they read", "and might like")
    for first in (1, 61, 123, 201, 344):
        history = [first, first + 1]
        best, _ = model.rank([history], k=3)
        samples.add_row("\n".join(names[i] for i in history), "\n".join(names[i] for i in best[0]))
    stdout.print(samples)
    stderr.rule("5. what it promises")
    screen.show(model.statement.text())
    say(
        f"\nwritten to {output}: the data with its long-tail plot in data/, the released models in run/ (try: dpformer show "
        f"{folder}), dpformer/ and transitions/, and the first two to look at in {output / 'report.html'}"
    )


def did_table(did: dict[str, dict[str, Any]]) -> Table:
    """What each run did; `demo_steps` has the figures of steps."""
    table = Table("what it did", *(f"preset {name}" for name in did))
    columns = [_did(**one) for one in did.values()]
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _did(releases: int, epsilon: float, **steps: Any) -> dict[str, str]:
    shown = {"noisy statistics of people": str(releases), "epsilon, at most": f"{epsilon:.3g}"}
    if not steps:
        return shown | {"noisy gradients of people": "none"}
    low, median, high = steps["norms_not_private"]
    ours, plain = steps["seconds_per_step"], steps["seconds_per_step_of_plain_pytorch"]
    moved = f"{100 * steps['attention_shift_not_private']:.2g} %"
    return shown | {
        "noisy gradients of people": f"{steps['steps']} steps, about {steps['users_per_step']:,} users each",
        "gradient norms before clipping*": f"{low:.2g} to {high:.2g}, median {median:.2g}",
        "after clipping": f"at most {steps['clipped_to']:g}",
        "attention moved by Re-Attention*": moved if steps["reattention"] else f"off; it would move {moved}",
        "a step, on so small a log": f"{ours:.2f} s; plain PyTorch, without privacy: {plain:.2f} s",
    }
