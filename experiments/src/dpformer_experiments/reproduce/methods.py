"""The methods that the tables compare, in families. To add one, add a line to `METHODS`.

Rows have the order of this list. Cells run in the order of `first` (lower is earlier), so that a small budget of time goes to
cells that are cheap and informative; `queue_of_runs` has the order over all results.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from dpformer_experiments.reproduce import common, paper
from dpformer_experiments.reproduce.cells import Cell

INF = math.inf
DELTA = 1e-5

COMMON, REPAIRED, LITERAL = "Common recipe", "The paper's shape, repaired", "The paper's settings, literally"
OURS, SMALL_BUDGETS, BASELINES = "Ours", "Small budgets", "Statistics and baselines"
# Each family and its protocol; the tables show them in this order.
FAMILIES: dict[str, str] = {
    COMMON: (
        "One recipe that trains well, only the architecture exchanged: one block of width 32, histories of 50 "
        "items, a vocabulary of 1,000 items by the noisy histogram with its logarithm as output bias, no dropout, "
        "40 steps of half of all users. The learning rate of each architecture is the best of the same five rates "
        "(0.009 to 0.28) on the validation item, at epsilon 8 with one seed (`dpformer reproduce rates`); other "
        "epsilons have the same rate. Trained on all but the last two items."
    ),
    REPAIRED: (
        "Two post-norm blocks, d = 64, 100 epochs of batches of 4,096 users at the largest rate of the paper's "
        "grid (0.009), histories of 50 items on both data sets; the paper does not state its lengths. With an output bias, "
        "a vocabulary of 1,000 items, and no dropout. One seed. Trained on all but the last two items."
    ),
    LITERAL: (
        "Dropout of 0.2 and 0.5, the whole catalogue, no output bias, and of the paper's grid the batch of 1,024 "
        "and the rate 0.003. Two rows at epsilon 8, one seed, show what these settings give. What is known of the "
        "reasons: the paper does not state its delta (fastDP, which it builds on, takes 1 / (2 users) by "
        "default); it reports the best of 25 settings on the test item; and dropout, no output bias and the whole "
        "catalogue each cost accuracy under noise (docs/statistics.md)."
    ),
    OURS: ("Our presets, their settings chosen on the validation item, then trained on all but the test item."),
    SMALL_BUDGETS: (
        "Presets as they are, trained on all but the test item, one seed: what to expect of epsilon 1 to 3."
    ),
    BASELINES: ("Trained on all but the last two items."),
}
# Settings that the paper changes between its two data sets; lengths are SASRec's.
PAPER_ON: dict[str, dict[str, Any]] = {
    "ml-1m": {"max_length": 200, "dropout": 0.2},
    "amazon-games": {"max_length": 50, "dropout": 0.5},
}
REPAIR: dict[str, Any] = {
    "dropout": 0.0,
    "vocabulary": 1000,
    "batch_size": 4096,
    "learning_rate": 9e-3,
    "max_length": 50,
}
# What the figures cut to save time: width, blocks and histories, never epochs. On Amazon Games 89 % of all pairs of a
# vocabulary of 1,000 items lie within 13.
SMALL: dict[str, dict[str, Any]] = {
    "ml-1m": {"max_length": 20, "d": 32, "blocks": 1},
    "amazon-games": {"max_length": 13, "d": 32, "blocks": 1},
}
# Rows whose records have an earlier name than the preset has, and what pages call them.
PRESET_NAMES = {
    "DPFormer, pure": "DPFormer, preset dpformer",
    "DPFormer with a private prior": "DPFormer with DP transitions, preset default",
    "DP transitions and the distilled Transformer": "DP transitions and the distilled Transformer, preset distilled",
}
# The paper's two models, by what they add to the preset `paper`.
PLAIN: dict[str, Any] = {"reattention": "off"}
CORRECTED: dict[str, Any] = {"reattention": "logits"}


@dataclass(frozen=True)
class Method:
    """A row of the tables, for each of its epsilons. options: settings that change the preset. work: see `work.do`.

    on: options for one data set. only: the one data set that it can use. ceiling: add a row with epsilon inf, the model without
    privacy, with these options. compare: the method of the paper to compare with; its own name by default. seeds: at most so
    many. shown: epsilons whose rows are shown without being run. instead: what a row without figures says.
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
    family: str = BASELINES
    seeds: int | None = None
    shown: tuple[float, ...] = ()
    instead: str = ""

    def cells(self, dataset: str, seeds: int, delta: float = DELTA) -> list[Cell]:
        """One cell for each epsilon and seed."""
        if self.only not in (None, dataset):
            return []
        budgets = self.epsilons if self.ceiling is None else (*self.epsilons, INF)
        # Exact popularity is not random: one seed is enough.
        count = 1 if self.work == "popularity" else min(seeds, self.seeds or seeds)
        result = []
        for epsilon in budgets:
            at_inf = self.ceiling or {} if math.isinf(epsilon) else {}
            options = {**self.options, **self.on.get(dataset, {}), **at_inf}
            result += [
                Cell(dataset, self.name, epsilon, seed, self.work, self.preset, options, delta=delta)
                for seed in range(1, count + 1)
            ]
        return result


def row_name(name: str, family: str) -> str:
    """The row of a method of the paper in a family: "Transformer, repaired"."""
    return f"{name.partition(' (')[0]}, {family}"


POPULAR = "popularity, not private"


def shown(method: str) -> str:
    """The name of a method on a page. Records keep the earlier names of the presets."""
    for name, preset in PRESET_NAMES.items():
        method = method.replace(name, preset)
    return method


def _common(architecture: str, **more: Any) -> Method:
    """An architecture with the common recipe; with `more` it corrects attention, and has no row without noise."""
    corrected = bool(more)
    return Method(
        row_name(paper.DPFORMER if corrected else architecture, "common recipe"),
        {**common.RECIPE, **common.ARCHITECTURES[architecture], **more},
        "pure",
        on=common.options_on(architecture),
        ceiling=None if corrected else {},
        compare=paper.DPFORMER if corrected else architecture,
        first=1,
        family=COMMON,
    )


def _repaired(name: str, first: int, **options: Any) -> Method:
    shape = {**REPAIR, **options}
    instead = "queued; see the common recipe"
    more: dict[str, Any] = {"compare": name, "first": first, "family": REPAIRED, "seeds": 1, "instead": instead}
    return Method(row_name(name, "repaired"), shape, "paper", **more)


def _literal(name: str, runs: bool, **options: Any) -> Method:
    epsilons, instead = (8.0,) if runs else (), "see the repaired row"
    more: dict[str, Any] = {"first": 7, "family": LITERAL, "seeds": 1, "shown": paper.EPSILONS, "instead": instead}
    return Method(name, options, "paper", epsilons=epsilons, on=PAPER_ON, **more)


def _ours(name: str, preset: str, options: dict[str, Any] | None = None, **more: Any) -> Method:
    """A preset on all but the test item: its settings were chosen on the validation item; then training uses that item too."""
    options = {"hold_out": "test", **(options or {})}
    return Method(f"{name}, all but the test item", options, preset, compare=paper.DPFORMER, family=OURS, **more)


def _small(name: str, preset: str) -> Method:
    more: dict[str, Any] = {"first": 3, "family": SMALL_BUDGETS, "seeds": 1, "epsilons": (1.0, 2.0, 3.0)}
    return Method(f"{name}, small budget", {"hold_out": "test"}, preset, compare=paper.DPFORMER, **more)


METHODS: tuple[Method, ...] = (
    *(_common(architecture) for architecture in common.ARCHITECTURES),
    _common(paper.VANILLA, **CORRECTED),
    _repaired(paper.GRU, 5, model="gru"),
    _repaired(paper.LSTM, 5, model="lstm"),
    _repaired(paper.UNSHARED, 4, tied=False, **PLAIN),
    _repaired(common.HALVED, 6, tied=False, d=32, **PLAIN),
    _repaired(paper.VANILLA, 3, **PLAIN),
    _repaired(paper.DPFORMER, 3),
    _literal(paper.GRU, False, model="gru"),
    _literal(paper.LSTM, False, model="lstm"),
    _literal(paper.UNSHARED, False, tied=False, **PLAIN),
    _literal(paper.VANILLA, True, **PLAIN),
    _literal(paper.DPFORMER, True),
    _ours("DPFormer, pure", "pure"),
    # Chosen on the validation item of two seeds; on MovieLens-1M it changes nothing there (docs/statistics.md).
    _ours(
        "DPFormer, pure with a vocabulary of 2,000",
        "pure",
        {"vocabulary": 2000},
        only="amazon-games",
        epsilons=(10.0,),
    ),
    _ours("DPFormer with a private prior", "default"),
    # A Transformer that learns from the statistics and needs no budget of its own, with the statistics.
    _ours("DP transitions and the distilled Transformer", "distilled"),
    _ours("DP transitions", "transitions"),
    _ours("Transformer distilled from DP transitions", "distilled", options={"transitions.weight": 0.0}, first=2),
    _small("DP popularity", "popularity"),
    _small("DPFormer with a private prior", "default"),
    _small("DPFormer, pure", "pure"),
    _small("DP transitions and the distilled Transformer", "distilled"),
    Method(POPULAR, work="popularity", epsilons=(INF,)),
    Method("DP popularity", preset="popularity"),
    Method("DP transitions", preset="transitions", compare=paper.DPFORMER, first=2),
    Method("DPFormer, pure", preset="pure", compare=paper.DPFORMER, ceiling={}, first=2),
    Method(
        "DP transitions, tuning accounted",
        work="tuned transitions",
        epsilons=(8.0, 10.0),
        compare=paper.DPFORMER,
        first=2,
    ),
)


def in_order(methods: tuple[Method, ...], dataset: str, seeds: int, delta: float = DELTA) -> list[Cell]:
    """All cells by `first`, then by seed: all cells have one seed before any has the next."""
    ranked = [(method.first, cell) for method in methods for cell in method.cells(dataset, seeds, delta)]
    return [cell for _, cell in sorted(ranked, key=lambda pair: (pair[0], pair[1].seed))]
