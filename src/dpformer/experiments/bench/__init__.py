"""Benchmarks, each a module with `run(quick: bool) -> dict` (figures, JSON-ready) and `show(figures)`, something to print.

They are looked up by name, so that asking for one imports only that one. `training` is the one that `dpformer bench` runs; it
also has a page and plots.
"""

BENCHMARKS: dict[str, str] = {
    "training": "dpformer.experiments.bench.training",
    "prepare": "dpformer.experiments.bench.prepare",
    "noise": "dpformer.experiments.bench.noise",
    "ranks": "dpformer.experiments.bench.ranks",
    "spark": "dpformer.experiments.bench.spark",
}
DEFAULT = "training"
