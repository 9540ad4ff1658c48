"""Results that a command remakes: the paper's tables and figures, and our own.

A result is a module with

    run(**options) -> dict     figures, ready for JSON, with a list `rows` of flat records; of the options of `dpformer reproduce`
                               it takes those that it names; if it trains, also `how`, a `runner.Running`
    page(figures) -> Page      the same for people
    draw(figures) -> Figure    optional: the plot

and is looked up by name, so that asking for one imports only that one. Those that train are declarations: a list of cells
(`cells.Cell`, in the order of how telling they are) for the one runner (`runner.run_cells`), which caches, resumes, and keeps to
a budget of time. What is compared in the two tables is one list, `methods.METHODS`.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """Where a result is made: a module of this package, and the options that belong to its name."""

    module: str
    about: str
    options: dict[str, Any] = field(default_factory=dict)


RESULTS: dict[str, Result] = {
    "table-1": Result("tables", "accuracy on MovieLens-1M beside the paper's", {"name": "table-1"}),
    "table-2": Result("tables", "accuracy on Amazon Games beside the paper's", {"name": "table-2"}),
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
    "results": Result("results", "all tables in one page, docs/results.md"),
}
