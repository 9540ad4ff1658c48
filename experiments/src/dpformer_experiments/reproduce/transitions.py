"""Popularity, DP popularity and DP transition statistics on the paper's two data sets.

Models are fitted on all events before the held-out item. Their settings are the defaults, which were chosen on the validation
item; nothing is chosen here. Noise is seeded so that the figures can be reproduced; a model that is published must not be seeded.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpformer.data import Dataset
from dpformer.errors import DataError, PrivacyError
from dpformer.evaluation import Evaluation, evaluate, held_out
from dpformer.fit.scorers import count_events, popularity_of, to_scorer
from dpformer.models import Recommender
from dpformer.privacy import make_plan
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.query import Asker
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from dpformer.statistics.settings import TransitionSettings
from dpformer_experiments.curators import seeded_curator
from dpformer_experiments.reproduce.data_sets import VARIABLES, find_set
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.transition_answers import measure_transitions, transition_shares

DELTA = 1e-5
POPULARITY, DP_POPULARITY = "popularity (not private)", "DP popularity"
ONE_STAGE, THREE_STAGES = "DP transitions, one release", "DP transitions"

# NDCG@10 and HIT@10 in % on the test item, of a prototype of the same statistics.
EXPECTED: dict[tuple[str, str, float | None], tuple[float, float]] = {
    ("ml-1m", POPULARITY, None): (1.74, 3.53),
    ("amazon-games", POPULARITY, None): (1.23, 2.15),
    ("ml-1m", ONE_STAGE, 5.0): (11.03, 18.6),
    ("ml-1m", ONE_STAGE, 8.0): (12.44, 21.0),
    ("ml-1m", ONE_STAGE, 10.0): (13.08, 22.0),
    ("amazon-games", ONE_STAGE, 5.0): (3.62, 6.09),
    ("amazon-games", ONE_STAGE, 8.0): (4.09, 6.96),
    ("amazon-games", ONE_STAGE, 10.0): (4.26, 7.28),
    ("ml-1m", THREE_STAGES, 5.0): (11.57, 19.4),
    ("ml-1m", THREE_STAGES, 8.0): (12.88, 21.5),
    ("ml-1m", THREE_STAGES, 10.0): (13.32, 22.2),
    ("amazon-games", THREE_STAGES, 5.0): (3.68, 6.16),
    ("amazon-games", THREE_STAGES, 8.0): (4.13, 6.98),
    ("amazon-games", THREE_STAGES, 10.0): (4.31, 7.29),
}


def run(
    *,
    epsilon: Sequence[float] = (5.0, 8.0, 10.0),
    seeds: int = 3,
    item: str = "test",
    data: Mapping[str, Path] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fit and evaluate all models on both data sets, once for each epsilon and noise seed (1, 2, ...)."""
    if item not in ("test", "validation"):
        raise DataError(f"no item {item!r} is held out; there are: test, validation")
    if any(math.isinf(eps) for eps in epsilon):
        raise PrivacyError("epsilon inf means no noise, but these statistics are noisy counts; give a finite --epsilon")
    epsilons = [float(eps) for eps in epsilon]
    for eps in epsilons:
        gaussian_multiplier(eps, DELTA)  # refuses an impossible budget before data is read
    # All of them first, so that a missing file is an error now and not after an hour.
    datasets = {name: find_set(name, data or {}) for name in VARIABLES}
    result: dict[str, Any] = {
        "item": item,
        "delta": DELTA,
        "seeds": list(range(1, seeds + 1)),
        "protocols": {},
        "rows": [],
    }
    for name, dataset in datasets.items():
        part = measure_set(name, dataset, epsilons, seeds, item, say)
        result["protocols"][name] = part["protocol"]
        result["rows"] += part["rows"]
    return result


def measure_set(
    name: str, dataset: Dataset, epsilons: Sequence[float], seeds: int, item: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """The `protocol` and the `rows` of a data set, one row for each model and epsilon."""
    held, item_count = held_out(dataset.sequences, item), len(dataset.catalogue)
    people = held.histories
    say(f"{name}: {POPULARITY}")
    exact = evaluate(count_events(people, item_count), held, item_count)
    rows = [_row(name, POPULARITY, None, None, [exact])]
    models: dict[str, TransitionSettings | None] = {
        DP_POPULARITY: None,
        ONE_STAGE: TransitionSettings.one_stage(),
        THREE_STAGES: TransitionSettings(),
    }
    for model, settings in models.items():
        shares = {HISTOGRAM: 1.0} if settings is None else transition_shares(settings)
        for epsilon in epsilons:
            plan = make_plan(len(people), epsilon, DELTA, shares=shares)
            evaluations = []
            for seed in range(1, seeds + 1):
                say(f"{name}: {model}, epsilon {epsilon:g}, seed {seed}")
                with seeded_curator(people, plan, seed) as curator:
                    private = _fit(curator, item_count, len(people), settings)
                evaluations.append(evaluate(private, held, item_count))
            rows.append(_row(name, model, epsilon, gaussian_multiplier(epsilon, DELTA), evaluations))
    return {"protocol": exact.protocol.line(), "rows": rows}


def _fit(asker: Asker, items: int, users: int, settings: TransitionSettings | None) -> Recommender:
    """DP transitions; without settings, DP popularity."""
    if settings is None:
        return popularity_of(asker.ask(Histogram(items)))
    return to_scorer(measure_transitions(asker, items, users, settings), settings)


def _row(
    dataset: str, model: str, epsilon: float | None, sigma: float | None, evaluations: list[Evaluation]
) -> dict[str, Any]:
    """Mean and standard deviation over noise seeds of every figure."""
    flat = [_flat(evaluation) for evaluation in evaluations]
    values = {figure: [one[figure] for one in flat] for figure in flat[0]}
    return {
        "dataset": dataset,
        "model": model,
        "epsilon": epsilon,
        "noise_multiplier": sigma,
        "figures": {
            figure: {
                "mean": round(statistics.fmean(of_seeds), 6),
                "std": round(statistics.stdev(of_seeds), 6) if len(of_seeds) > 1 else None,
            }
            for figure, of_seeds in values.items()
        },
    }


def _flat(evaluation: Evaluation) -> dict[str, float]:
    figures = {name: figure.value for name, figure in evaluation.masked.items()}
    figures |= {f"unmasked {name}": figure.value for name, figure in evaluation.unmasked.items()}
    for name, part in evaluation.slices.items():
        figures |= {f"{name} {metric}": part.metrics[metric].value for metric in ("ndcg@10", "hit@10")}
    return figures | evaluation.coverage | evaluation.mean_popularity


def _expected(result: dict[str, Any], row: dict[str, Any]) -> str:
    pair = EXPECTED.get((row["dataset"], row["model"], row["epsilon"])) if result["item"] == "test" else None
    return f"{pair[0]:.2f} / {pair[1]:.2f}" if pair else ""


def _cells(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    def percent(figure: str) -> str:
        mean_and_std = row["figures"][figure]
        spread = f" ± {100 * mean_and_std['std']:.2f}" if mean_and_std["std"] is not None else ""
        return f"{100 * mean_and_std['mean']:.2f}{spread}"

    return [
        row["dataset"],
        row["model"],
        "" if row["epsilon"] is None else f"{row['epsilon']:g}",
        percent("ndcg@10"),
        percent("hit@10"),
        _expected(result, row),
        f"{100 * row['figures']['unmasked ndcg@10']['mean']:.2f}",
        " / ".join(f"{100 * row['figures'][f'{part} ndcg@10']['mean']:.2f}" for part in ("head", "torso", "tail")),
        f"{100 * row['figures']['coverage@10']['mean']:.1f}",
    ]


_HEADINGS = (
    "data",
    "model",
    "epsilon",
    "NDCG@10",
    "HIT@10",
    "prototype",
    "unmasked NDCG@10",
    "head / torso / tail NDCG@10",
    "coverage@10",
)


def _notes(result: dict[str, Any]) -> list[str]:
    return [
        f"In %; mean and standard deviation over {len(result['seeds'])} noise seeds; delta {result['delta']:g}, user level: one "
        "user's events are replaced by none; no sampling. Prototype: NDCG@10 / HIT@10 that the statistics were expected to "
        "reach. Head, torso and tail: targets among the most frequent items that make up 50 %, the next 30 % and the last 20 % "
        "of the events.",
        "The same seeds are used at every epsilon and in every model.",
        *(f"{name}: {line}." for name, line in result["protocols"].items()),
    ]


def page(result: dict[str, Any]) -> Page:
    """The table with its notes."""
    epsilons = dict.fromkeys(row["epsilon"] for row in result["rows"] if row["epsilon"] is not None)
    options = "".join(f" --epsilon {epsilon:g}" for epsilon in epsilons)
    command = f"dpformer reproduce transitions{options} --seeds {len(result['seeds'])} --item {result['item']} -o docs/results"
    rows = [tuple(_cells(result, row)) for row in result["rows"]]
    return Page(f"DP transition statistics: {result['item']} item", command, _HEADINGS, rows, _notes(result))
