"""A table of small methods, for the embedded data: seconds with the same runner."""

from pathlib import Path
from typing import Any

from dpformer_experiments.reproduce import paper, tables
from dpformer_experiments.reproduce.methods import INF, Method, in_order
from dpformer_experiments.reproduce.runner import Running, run_cells

# All users in each batch: the noise has a closed form, and nothing is to be searched for.
TINY = {"d": 4, "max_length": 8, "epochs": 4.0, "batch_size": 10**6, "blocks": 1, "dropout": 0.1}


def small_table(name: str, demo: dict[str, Path], how: Running, seeds: int = 1) -> dict[str, Any]:
    methods = small_methods()
    return tables.measure(name, methods, run_cells(in_order(methods, "demo", seeds), demo, how))


def small_methods() -> tuple[Method, ...]:
    return (
        Method(
            paper.DPFORMER,
            {**TINY, "reattention": "logits"},
            "paper",
            epsilons=(8.0,),
            ceiling={},
            first=1,
        ),
        Method("popularity, not private", work="popularity", epsilons=(INF,)),
        Method("DP popularity", preset="popularity", epsilons=(8.0,)),
    )
