"""`dpformer demo`: what the package can do, on data that it brings along."""

from pathlib import Path
from typing import Annotated, Any

import typer

_RATE, _STEPS, _MAX_LENGTH, _TOKEN_BUDGET = 0.05, 5, 50, 512


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path("demo-output"),
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on stdout.")] = False,
) -> None:
    """Prepare the embedded data, show it, and draw Poisson batches from it."""
    import numpy as np
    from rich.table import Table

    from dpformer.cli.output import print_json, stderr, stdout
    from dpformer.cli.prepare import statistics_table
    from dpformer.data import Dataset, PoissonSampler, load, poisson_batches, prepare_named, save, statistics
    from dpformer.data.named import DEMO
    from dpformer.data.store import PLOT

    with stderr.status("preparing the embedded data ..."):
        save(prepare_named(DEMO), output, force=True)
        dataset = load(output)
    figures: dict[str, Any] = statistics(dataset)

    def samples(dataset: Dataset, users: int, items: int) -> Table:
        names = dataset.names()
        table = Table("reader", f"what they read (the last {items})", title="some sequences")
        for user in range(users):
            table.add_row(
                str(dataset.sequences.users[user]), " → ".join(names[item] for item in dataset.sequences[user][-items:])
            )
        return table

    train = dataset.split().train
    sampler = PoissonSampler(len(train), _RATE)
    table = Table("step", "users", "micro-batches", "events", "padding", title=f"Poisson batches at rate {_RATE}")
    batches = []
    for step, batch in enumerate(
        poisson_batches(train, sampler, _STEPS, max_length=_MAX_LENGTH, token_budget=_TOKEN_BUDGET), 1
    ):
        events = sum(int(part.lengths.sum()) for part in batch)
        positions = sum(part.tokens.numel() for part in batch)
        row = {
            "users": sum(len(part.users) for part in batch),
            "micro_batches": len(batch),
            "events": events,
            "padding": 1 - events / positions if positions else 0.0,
        }
        batches.append(row)
        table.add_row(
            str(step), str(row["users"]), str(row["micro_batches"]), f"{row['events']:,}", f"{row['padding']:.0%}"
        )
    if as_json:
        print_json({**figures, "batches": batches, "output": str(output)})
        return
    stdout.print(statistics_table(figures))
    stdout.print(samples(dataset, users=4, items=4))
    stdout.print(table)
    lengths = np.minimum(train.lengths, _MAX_LENGTH)
    stdout.print(
        f"padded to {_MAX_LENGTH} each, {1 - lengths.mean() / _MAX_LENGTH:.0%} of the positions would be padding; "
        "who was drawn comes from the operating system's entropy and differs at every run"
    )
    stderr.print(f"written to {output} (long tail drawn in {output / PLOT})", markup=False, soft_wrap=True)
