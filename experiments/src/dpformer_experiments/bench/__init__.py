"""Benchmarks, each a module with `run(quick: bool) -> dict` (figures, JSON-ready) and `show(figures)`, something to print.

They are looked up by name, so that asking for one imports only that one. `training` is the one that `dpformer bench` runs; it
also has a page and plots, and `PART` names a benchmark whose figures are a part of that page.
"""

BENCHMARKS: dict[str, str] = {
    "training": "dpformer_experiments.bench.training",
    "prepare": "dpformer_experiments.bench.prepare",
    "noise": "dpformer_experiments.bench.noise",
    "grouping": "dpformer_experiments.bench.grouping",
    "ranks": "dpformer_experiments.bench.ranks",
    "spark": "dpformer_experiments.bench.spark",
}
DEFAULT = "training"
