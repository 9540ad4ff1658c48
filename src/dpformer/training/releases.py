"""What a run releases beside its steps: the item histogram and the statistics of a prior.

Each is charged to the ledger before its noise is drawn. A replay from the first checkpoint has the same noise, so that it gives
the same release and costs nothing more.
"""

from __future__ import annotations

import math

import torch

from dpformer.models.base import SequenceModel
from dpformer.models.distilled import distil
from dpformer.models.statistics.transitions import DPTransitions
from dpformer.models.transformer import Transformer
from dpformer.privacy import ItemFrequencies, PrivacyPlan, assume_public, fingerprint, noisy_histogram
from dpformer.training.charged import charged
from dpformer.training.recipe import HISTOGRAM, PRIOR, Recipe
from dpformer.training.trainer import Trainer, digest


def histogram(trainer: Trainer, items: int) -> ItemFrequencies | None:
    """The item histogram, if the plan has one."""
    plan, train = trainer.plan, trainer.train
    release = next((r for r in plan.releases if r.name == HISTOGRAM), None)
    if release is None:
        return None
    if not plan.private:
        return assume_public(train.items, train.offsets, items, floor=1 / plan.users)
    assert trainer.noise is not None
    assert trainer.ledger is not None
    noise = trainer.noise.state()
    # With the noise: the ledger is published, and a bare hash of the data would confirm a guess of it.
    inputs = fingerprint(noise, HISTOGRAM, digest(train.items, train.offsets))
    trainer.ledger.authorise_release(HISTOGRAM, fingerprint(noise), inputs)
    return noisy_histogram(train.items, train.offsets, items, release, trainer.noise, plan.users)


def prior(trainer: Trainer, recipe: Recipe, items: int) -> DPTransitions | None:
    """The statistics of the prior, if the plan has them; a network that is to be distilled from them is."""
    train = trainer.train
    releases = [r for r in trainer.plan.releases if r.name.startswith(PRIOR)]
    if not releases:
        return None
    assert trainer.noise is not None
    assert trainer.ledger is not None
    found = DPTransitions()
    share = found.shares[releases[0].name.removeprefix(PRIOR)]
    about = fingerprint(recipe.model_dump_json(), digest(train.items, train.offsets))
    found.fit(
        train.items,
        train.offsets,
        items,
        noise_multiplier=releases[0].noise_multiplier * math.sqrt(share),
        gaussian=charged(releases, trainer.ledger, trainer.noise, about),
    )
    if recipe.distil:
        distil(trainer.model, found, recipe.distil)
        trainer.know_vocabulary()
    return found


def set_errors(
    model: SequenceModel, plan: PrivacyPlan, frequencies: ItemFrequencies | None, recipe: Recipe, averaging: float = 1.0
) -> None:
    """Tell Re-Attention the noise. Positions are counted as if all sequences were of the greatest length: lengths are private."""
    if isinstance(model, Transformer) and model.reattention is not None and frequencies is not None and plan.private:
        p = torch.from_numpy(frequencies.probability).float()
        model.set_errors(plan.noise_multiplier, plan.batch_size, p, torch.ones(recipe.max_length), averaging)
