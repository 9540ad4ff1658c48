"""`dpformer demo`: the whole way, on data that the package brings along."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dpformer.cli import output as screen
from dpformer.cli.evaluate import table as figures_table
from dpformer.cli.options import AsJson
from dpformer.cli.output import print_json, say, stderr, stdout
from dpformer.cli.prepare import statistics_table
from dpformer.cli.progress import show_progress
from dpformer.errors import DPFormerError


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path("demo-output"),
    epsilon: Annotated[float, typer.Option(help="The budget.")] = 8.0,
    as_json: AsJson = False,
) -> None:
    """Prepare the embedded data, train privately, evaluate, recommend, report: about a minute."""
    from dpformer.artifact import load as load_artifact
    from dpformer.data import load, prepare_named, save, statistics
    from dpformer.data.named import DEMO
    from dpformer.evaluation import Scorer, evaluate, held_out
    from dpformer.files import write_file, write_json
    from dpformer.fit.presets import make_recipe
    from dpformer.fit.run import start
    from dpformer.fit.scorers import count_events
    from dpformer.report import make_report

    data, folder = output / "data", output / "run"
    if output.exists():
        if not (data / "manifest.json").exists():
            raise DPFormerError(f"{output}: exists and was not written by the demo; choose another with -o")
        shutil.rmtree(output)
    stderr.rule("1. a log becomes sequences")
    save(prepare_named(DEMO), data)
    dataset = load(data)
    if not as_json:
        stdout.print(statistics_table(statistics(dataset)))
    stderr.rule("2. private training")
    run = start(folder, data, make_recipe(epsilon=epsilon))
    with show_progress(run.plan, quiet=False) as on_progress:
        run.train(on_progress)
    run.close()
    stderr.rule("3. how good is it?")
    model = load_artifact(folder)
    held, items = held_out(dataset.sequences, "test"), len(dataset.catalogue)
    contenders: dict[str, Scorer] = {f"{model.model.spec.name}, epsilon {epsilon:g}": model}
    for kind, name in (("transitions", "DP transition statistics"), ("popularity", "DP popularity")):
        # Runs of their own, with ledgers of their own: what they release is as private as the model.
        start(output / kind, data, make_recipe(kind, epsilon=epsilon)).train()
        contenders[f"{name}, epsilon {epsilon:g}"] = load_artifact(output / kind)
    contenders["popularity, not private"] = count_events(dataset.train("validation"), items)
    evaluations = {name: evaluate(it, held, items) for name, it in contenders.items()}
    own, counted = next(iter(evaluations)), evaluations["popularity, not private"]
    write_json(folder / "metrics.json", {"not_private": True, "test": evaluations[own].figures()}, 0o600)
    write_file(output / "report.html", make_report([folder]).html.encode(), 0o600)
    if as_json:
        figures = {name: {key: f.value for key, f in one.masked.items()} for name, one in evaluations.items()}
        privacy = run.statement().model_dump(mode="json")
        print_json({**statistics(dataset), "test": figures, "privacy": privacy, "output": str(output)})
        return
    comparison = Table("", "NDCG@10", "HIT@10", title="test item, seen items masked, in percent", title_justify="left")
    for name, one in evaluations.items():
        comparison.add_row(name, *(f"{100 * one.masked[key].value:.1f}" for key in ("ndcg@10", "hit@10")))
    stdout.print(comparison)
    stdout.print(figures_table("the private model in detail", {own: evaluations[own]}, counted))
    stderr.rule("4. recommendations for people it has never seen")
    names = dataset.names()
    samples = Table("they read", "and might like")
    for first in (1, 61, 123, 201, 344):
        history = [first, first + 1]
        best, _ = model.rank([history], k=3)
        samples.add_row("\n".join(names[i] for i in history), "\n".join(names[i] for i in best[0]))
    stdout.print(samples)
    stderr.rule("5. what it promises")
    screen.show(run.statement().text())
    say(
        f"\nwritten to {output}: the data with its long-tail plot in data/, the released model in run/ (try: dpformer show "
        f"{folder}), and all of this to look at in {output / 'report.html'}"
    )
