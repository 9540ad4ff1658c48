"""Benchmarks, each a module with `run(quick: bool) -> dict` (figures, ready for JSON) and `show(figures)`, which returns a table.

They are looked up by name, so that only the chosen one is imported. `training` is the default of `dpformer bench`. It also has
a page and plots; a module with a constant `PART` adds its figures to that page under that name.
"""

BENCHMARKS: dict[str, str] = {
    "training": "dpformer_experiments.bench.training",
    "prepare": "dpformer_experiments.bench.prepare",
    "noise": "dpformer_experiments.bench.noise",
    "grouping": "dpformer_experiments.bench.grouping",
    "models": "dpformer_experiments.bench.models",
    "latency": "dpformer_experiments.bench.latency",
    "ranks": "dpformer_experiments.bench.ranks",
}
DEFAULT = "training"
