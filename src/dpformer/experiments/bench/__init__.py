"""Benchmarks, each a module with `run(quick: bool) -> dict` (figures, JSON-ready) and `show(figures) -> str | Table`.

They are looked up by name, so that asking for one imports only that one.
"""

BENCHMARKS: dict[str, str] = {
    "prepare": "dpformer.experiments.bench.prepare",
    "clipping": "dpformer.experiments.bench.clipping",
    "reattention": "dpformer.experiments.bench.reattention",
    "noise": "dpformer.experiments.bench.noise",
}
