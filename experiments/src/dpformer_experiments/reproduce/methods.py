"""The methods that the tables compare. To add one, add a line to `METHODS`.

Rows have the order of this list. Cells run in the order of `first` (lower is earlier), so that a small budget of time goes to
cells that are cheap and informative.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from dpformer_experiments.reproduce import paper
from dpformer_experiments.reproduce.cells import Cell

INF = math.inf
DELTA = 1e-5

# Settings that the paper changes between its two data sets; lengths are SASRec's.
PAPER_ON: dict[str, dict[str, Any]] = {
    "ml-1m": {"max_length": 200, "dropout": 0.2},
    "amazon-games": {"max_length": 50, "dropout": 0.5},
}
# Without noise, a small batch makes more steps per epoch.
CEILING = {"batch_size": 256, "learning_rate": 1e-3}
# 60 % of the budget for the statistics, 3 % of that for the histogram, as in the presets; the steps get the rest.
THEN_STEPS: list[dict[str, Any]] = [
    {"stage": "histogram", "share": 0.018},
    {"stage": "transitions", "share": 0.582, "weight": 2.0},
    {"stage": "distil"},
    {"stage": "dpsgd", "epochs": 20.0, "learning_rate": 3e-3},
]


@dataclass(frozen=True)
class Method:
    """A row of the tables, for each of its epsilons. options: settings that change the preset. work: see `work.do`.

    on: options for one data set. only: the one data set that it can use. ceiling: add a row with epsilon inf, the model without
    privacy, with these options. compare: the method of the paper to compare with; its own name by default.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    preset: str = "default"
    work: str = "recipe"
    epsilons: tuple[float, ...] = paper.EPSILONS
    on: dict[str, dict[str, Any]] = field(default_factory=dict)
    only: str | None = None
    ceiling: dict[str, Any] | None = None
    compare: str | None = None
    first: int = 0

    def cells(self, dataset: str, seeds: int, delta: float = DELTA) -> list[Cell]:
        """One cell for each epsilon and seed."""
        if self.only not in (None, dataset):
            return []
        budgets = self.epsilons if self.ceiling is None else (*self.epsilons, INF)
        result = []
        for epsilon in budgets:
            at_inf = self.ceiling or {} if math.isinf(epsilon) else {}
            options = {**self.options, **self.on.get(dataset, {}), **at_inf}
            # Exact popularity is not random: one seed is enough.
            count = 1 if self.work == "popularity" else seeds
            result += [
                Cell(dataset, self.name, epsilon, seed, self.work, self.preset, options, delta=delta)
                for seed in range(1, count + 1)
            ]
        return result


def as_in_paper(name: str, first: int, ceiling: bool = True, **options: Any) -> Method:
    """A method of the paper with its settings."""
    return Method(name, options, "paper", on=PAPER_ON, ceiling=CEILING if ceiling else None, first=first)


METHODS: tuple[Method, ...] = (
    as_in_paper(paper.GRU, 4, model="gru", reattention="off"),
    as_in_paper(paper.LSTM, 4, model="lstm", reattention="off"),
    as_in_paper(paper.UNSHARED, 3, tied=False, reattention="off"),
    as_in_paper(paper.VANILLA, 2, reattention="off"),
    # Without noise there is nothing to correct: its ceiling is the vanilla Transformer's.
    as_in_paper(paper.DPFORMER, 2, ceiling=False),
    Method("DPFormer, pure", preset="pure", compare=paper.DPFORMER, ceiling={}, first=1),
    # The settings were chosen on the validation item; then training uses that item too.
    Method("DPFormer, pure, all but the test item", {"hold_out": "test"}, preset="pure", compare=paper.DPFORMER),
    Method(
        "DP transitions, all but the test item",
        {"hold_out": "test"},
        preset="transitions",
        compare=paper.DPFORMER,
    ),
    Method(
        "DPFormer with a private prior, all but the test item",
        {"hold_out": "test"},
        preset="whole",
        # The shares of the budget were chosen on the validation item; on ML-1M the network adds nothing there.
        on={"ml-1m": {"transitions.share": 0.9, "transitions.weight": 4.0}},
        compare=paper.DPFORMER,
    ),
    # A Transformer that learns from the statistics and needs no budget of its own: alone, and with the statistics.
    Method(
        "Transformer distilled from DP transitions, all but the test item",
        {"hold_out": "test", "transitions.weight": 0.0},
        compare=paper.DPFORMER,
    ),
    Method(
        "DP transitions and the distilled Transformer, all but the test item",
        {"hold_out": "test"},
        compare=paper.DPFORMER,
    ),
    # The same Transformer, then steps on people's data, which take a part of the budget from the statistics.
    *(
        Method(
            f"{what}, all but the test item",
            {"hold_out": "test", "max_length": 50, "stages": THEN_STEPS, **more},
            epsilons=(8.0,),
            compare=paper.DPFORMER,
            first=1,
        )
        for what, more in {
            "Transformer distilled, then DP-SGD": {"transitions.weight": 0.0},
            "DP transitions and the Transformer distilled, then DP-SGD": {},
        }.items()
    ),
    Method("popularity, not private", work="popularity", epsilons=(INF,)),
    Method("DP popularity", preset="popularity"),
    Method("DP transitions", preset="transitions", compare=paper.DPFORMER),
    # This row uses public data in addition: do not compare it with the other rows without saying so.
    Method(
        "DP transitions with public titles and genres, all but the test item",
        work="public transitions",
        only="ml-1m",
        compare=paper.DPFORMER,
    ),
    Method("DP transitions, tuning accounted", work="tuned transitions", epsilons=(8.0, 10.0), compare=paper.DPFORMER),
)


def in_order(methods: tuple[Method, ...], dataset: str, seeds: int, delta: float = DELTA) -> list[Cell]:
    """All cells by `first`, then by seed: all cells have one seed before any has the next."""
    ranked = [(method.first, cell) for method in methods for cell in method.cells(dataset, seeds, delta)]
    return [cell for _, cell in sorted(ranked, key=lambda pair: (pair[0], pair[1].seed))]
