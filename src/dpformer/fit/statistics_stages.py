"""The stages `histogram`, `transitions` and `distil`, and a private catalogue's items; `dpsgd` has the steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from typing import Any

from dpformer.data import Dataset, Sequences
from dpformer.errors import DPFormerError
from dpformer.fit.distil import distil, scale_of
from dpformer.fit.recipe import DistilSettings, HistogramSettings, TransitionsStageSettings
from dpformer.fit.scorers import to_scorer
from dpformer.fit.stage import Outputs, Progress, Setup, new_network
from dpformer.privacy import Answer, Curator
from dpformer.privacy.query import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import Histogram, standing_out
from dpformer.statistics.item_selection import ItemCounts
from dpformer.statistics.settings import TransitionSettings

Running = Generator[Progress, None, Outputs]
# Of the budget, for the transitions where there are no steps: the size of the head was chosen for it.
USUAL_SHARE = 0.97
# With fewer items than this above the noise of the histogram, presets ranked worse than exact popularity, or hardly better
# (docs/results/people.md: like Amazon Games, 6,000 people, epsilon 1, 2 and 4).
CLEAR_ITEMS = 10


def run_stages(setup: Setup, asker: Asker) -> Running:
    """Run the stages of a recipe but for its steps: yields after each piece of work, and returns what they made."""
    outputs = Outputs()
    for settings in setup.recipe.stages:
        if (run := _STAGES.get(settings.stage)) is not None:
            yield Progress(settings.stage, 0, 1, setup.plan)
            outputs = yield from run(setup, outputs, asker)
    return outputs


def _histogram(setup: Setup, before: Outputs, asker: Asker) -> Running:
    answer = ask_histogram(setup, asker)
    yield Progress("histogram", 1, 1, setup.plan, warning=_warning(setup, answer))
    return replace(before, histogram=answer)


def _warning(setup: Setup, histogram: Answer) -> str:
    """Say if the histogram is mostly noise: then the vocabulary is, too. Judged by released values alone."""
    clear = standing_out(histogram)
    if clear >= min(CLEAR_ITEMS, setup.items / 2):
        return ""
    cure = "a larger epsilon, more people or fewer items"
    if len(setup.recipe.stages) > 1:
        cure += ", or --preset popularity, which spends the whole budget on the histogram"
    return (
        f"only {clear} of {setup.items:,} items stand out from the noise of the histogram, and what is learned after it will be "
        f"mostly noise too. Take {cure}"
    )


def ask_histogram(setup: Setup, asker: Asker) -> Answer:
    """The item histogram, combined with that of the prior: one answer."""
    answer, prior = asker.ask(Histogram(setup.items)), setup.prior
    return answer if prior is None else prior.with_histogram(answer, setup.plan.users)


def _transitions(setup: Setup, before: Outputs, asker: Asker) -> Running:
    assert before.histogram is not None
    scorer = to_scorer(ask_transitions(setup, before.histogram, asker), TransitionSettings(), setup.features)
    yield Progress("transitions", 1, 1, setup.plan)
    return replace(before, transitions=scorer)


def ask_transitions(setup: Setup, histogram: Answer, asker: Asker) -> Measured:
    """The transitions, combined with those of the prior: three answers, each for cells where the one before saw something."""
    shares, own = setup.recipe.stage(HistogramSettings), setup.recipe.stage(TransitionsStageSettings)
    assert shares is not None
    assert own is not None
    whole = histogram.noise_std * shares.share**0.5  # of the whole budget
    # The noise multiplier of the transitions if they were one answer beside a histogram of the usual share.
    sigma = whole / (own.share / USUAL_SHARE) ** 0.5
    answers = measure(asker, histogram, TransitionSettings(), sigma, setup.plan.users)
    return answers if setup.prior is None else setup.prior.with_counts(answers, setup.plan.users)


def _distil(setup: Setup, before: Outputs, asker: Asker) -> Running:
    """Train a new network on what the transitions say. It asks for nothing."""
    settings, statistics = setup.recipe.stage(DistilSettings), setup.recipe.stage(TransitionsStageSettings)
    assert before.transitions is not None
    assert settings is not None
    assert statistics is not None
    # A network that is released alone answers empty histories by frequencies; beside transitions it does not.
    # Items of the head outside of the vocabulary would stand below all others, whatever the transitions say of them.
    network = new_network(
        setup,
        None if statistics.weight else before.frequencies(setup.plan.users),
        least_vocabulary=before.transitions.spec.head,
    )
    for step in distil(network, before.transitions, settings.steps):
        yield Progress("distil", step, settings.steps, setup.plan)
    transitions = before.transitions
    if transitions.targets is not None and statistics.weight:
        # Beside them the network repeats their scores, scaled, for the head alone.
        transitions = transitions.with_others(1 + scale_of(transitions) / statistics.weight)
    return replace(before, network=network, transitions=transitions)


_STAGES: dict[str, Callable[[Setup, Outputs, Asker], Running]] = {
    "histogram": _histogram,
    "transitions": _transitions,
    "distil": _distil,
}


def choose_items(curator: Curator[Sequences], dataset: Dataset) -> Dataset:
    """The data with a catalogue that may be named: of a private one the items that the Curator chooses, numbered anew."""
    if dataset.catalogue_mode != "private" or not curator.plan.private:
        return dataset
    answer = curator.ask(ItemCounts(dataset.catalogue["item_id"].to_list()))
    if not answer.labels:
        raise DPFormerError(
            "no item has enough users to be named privately (--catalogue private); give a public list with --catalogue FILE, or "
            "a larger epsilon. What was asked stays spent"
        )
    return restrict(curator, dataset, answer.labels)


def restrict(curator: Curator[Sequences], dataset: Dataset, labels: Collection[Any]) -> Dataset:
    """The data and the Curator's people with these items only."""
    chosen = dataset.with_items(labels)
    numbers = dataset.numbers_in(chosen.catalogue)
    curator.replace_events(lambda people: people.renumbered(numbers))
    return chosen
