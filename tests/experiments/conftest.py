"""The embedded data, prepared once, and a table of small methods on it: the same runner, in seconds."""

from pathlib import Path

import pytest

from dpformer.data import demo_frame, prepare, save
from dpformer.experiments.reproduce import paper
from dpformer.experiments.reproduce.methods import INF, Method

# All users in each batch: the noise has a closed form, and nothing is to be searched for.
TINY = {"d": 4, "max_length": 8, "epochs": 4.0, "batch_size": 10**6, "averaging": "none", "blocks": 1, "dropout": 0.1}


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("demo") / "data"
    save(prepare(demo_frame()), folder)
    return {"demo": folder}


def small_methods() -> tuple[Method, ...]:
    return (
        Method(
            paper.DPFORMER,
            {**TINY, "reattention": "logits"},
            "paper",
            epsilons=(8.0,),
            ceiling={},
            papers=True,
            first=1,
        ),
        Method("popularity, not private", work="popularity", epsilons=(INF,)),
        Method("DP popularity", {"model": "popularity"}, epsilons=(8.0,)),
    )
