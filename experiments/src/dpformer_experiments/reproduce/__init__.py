"""Results of `dpformer reproduce`: the paper's tables and figures, and our own.

A result is a module with

    run(**options) -> dict     figures, ready for JSON, with a list `rows` of flat records; its parameters are
                               options of `dpformer reproduce`; if it trains, `how` is a `runner.Running`
    page(figures) -> Page      the figures as a table with notes
    draw(figures) -> Figure    optional: the plot

and is looked up by name, so that only the chosen one is imported. A result that trains declares a list of cells (`cells.Cell`,
the cheap and informative ones first) for the runner (`runner.run_cells`), which caches, resumes, and keeps to a budget of time.
`methods.METHODS` lists the rows of the two tables.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """The module of this package that makes a result, and the options that belong to its name."""

    module: str
    about: str
    options: dict[str, Any] = field(default_factory=dict)


RESULTS: dict[str, Result] = {
    "table-1": Result("tables", "accuracy on MovieLens-1M beside the paper's", {"name": "table-1"}),
    "table-2": Result("tables", "accuracy on Amazon Games beside the paper's", {"name": "table-2"}),
    "rates": Result("common", "learning rates of the common recipe, on the validation item"),
    "paper": Result("queue_of_runs", "all trainings of these results, in the order of their value"),
    "reattention": Result("regimes", "Re-Attention in paired runs, by regime"),
    "attention-limit": Result("attention_limit", "what correcting attention can win at best, under noise"),
    "optimisers": Result("optimisers", "optimisers of DP-SGD in paired runs: ours, its parts, and others"),
    "same-seed": Result("same_seed", "what runs of one seed share: not their noise"),
    "ceiling": Result("ceiling", "a Transformer of SASRec's size without privacy, under the same evaluation"),
    "time-split": Result("time_split", "MovieLens-1M split by time, beside leave-one-out"),
    "embedding-sharing": Result(
        "heat_maps", "a shared embedding, over batch sizes and rates", {"name": "embedding-sharing"}
    ),
    "grid": Result("heat_maps", "both models over batch sizes and learning rates", {"name": "grid"}),
    "convergence": Result("convergence", "accuracy every five epochs (not private)"),
    "memory": Result("speed", "memory of private training, from `dpformer bench`", {"name": "memory"}),
    "throughput": Result("speed", "speed of private training, from `dpformer bench`", {"name": "throughput"}),
    "data": Result("data_sets", "sizes and long tails of the two data sets"),
    "error-table": Result("error_table", "variances through activations"),
    "attention": Result("attention", "attention distraction, measured"),
    "transitions": Result("transitions", "the DP transition statistics, all slices"),
    "claims": Result("claims", "the paper's claims and what was measured, in docs/paper.md"),
    "refit": Result("refit", "release again after each quarter of MovieLens-1M: fit, or refit"),
    "people": Result("people", "presets over 6,000 to 600,000 simulated people, beside the oracle"),
    "results": Result("results", "all tables in one page, docs/results.md"),
}
