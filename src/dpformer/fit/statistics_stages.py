"""What a run asks for beside its steps: the item histogram and the statistics of a prior."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from dpformer.data import Dataset, Sequences
from dpformer.errors import DPFormerError
from dpformer.fit.distil import distil
from dpformer.fit.dpsgd import Trainer
from dpformer.fit.recipe import PRIOR, Recipe
from dpformer.models.network import SequenceModel
from dpformer.models.transformer import Transformer
from dpformer.models.transitions import DPTransitions
from dpformer.privacy import Curator, PrivacyPlan
from dpformer.privacy.query import Asker
from dpformer.statistics.histogram import HISTOGRAM, Histogram, ItemFrequencies, frequencies
from dpformer.statistics.item_selection import ItemCounts


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


def histogram(asker: Asker, recipe: Recipe, plan: PrivacyPlan, items: int) -> ItemFrequencies | None:
    """The item histogram, if the recipe has one."""
    if not recipe.histogram_share:
        return None
    return frequencies(asker.ask(Histogram(items, name=HISTOGRAM)), plan.users)


def prior(asker: Asker, recipe: Recipe, trainer: Trainer, items: int) -> DPTransitions | None:
    """The statistics of the prior, if the recipe has them; a network that is to learn from them does."""
    if not recipe.prior_share:
        return None
    statistics = DPTransitions().fit(asker, items, PRIOR)
    if recipe.distil:
        distil(trainer.model, statistics, recipe.distil)
        trainer.query.forget_vocabulary()
    return statistics


def set_errors(
    model: SequenceModel, plan: PrivacyPlan, frequencies: ItemFrequencies | None, recipe: Recipe, averaging: float = 1.0
) -> None:
    """Tell Re-Attention the noise. Positions are counted as if all sequences were of the greatest length: lengths are private."""
    if isinstance(model, Transformer) and model.reattention is not None and frequencies is not None and plan.private:
        p = torch.from_numpy(frequencies.probability).float()
        model.set_errors(plan.noise_multiplier, plan.batch_size, p, torch.ones(recipe.max_length), averaging)
