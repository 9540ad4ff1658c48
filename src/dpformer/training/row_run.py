"""A run whose item tables are split over ranks by rows: rank 0 has the folder, and every rank its part of the state.

    rank 0                                       the others (`follow_rows`)
    `RowRun.opened`: recipe, plan, seed       -> build their rows, with a noise source of their own
    saves: its own state, and writes theirs   <- give their state, one rank at a time
      or, going on: hands each its state      -> take it
    releases histogram and prior
    `lead`: the histogram, as it was released -> use it
    a step, then: stop? save?                    the same
    gathers the tables, releases the model    <- give their rows, one rank at a time

A checkpoint is one folder, whole or not at all, so all ranks go on from the same step, and none draws noise again that another
sum had. Rank 0 holds the whole table once, when it writes the model.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_safetensors

from dpformer.data import Dataset, PoissonSampler
from dpformer.privacy import ItemFrequencies, Ledger, PrivacyPlan, noise_source
from dpformer.privacy.ledger import plan_from_json, plan_to_json
from dpformer.rows import Rows
from dpformer.training.checkpoint import pack
from dpformer.training.files import to_json
from dpformer.training.folder import RunLock
from dpformer.training.ranks import Ranks
from dpformer.training.recipe import Recipe
from dpformer.training.releases import set_errors
from dpformer.training.row_trainer import RowTrainer
from dpformer.training.rows import seed_of
from dpformer.training.run import Run
from dpformer.training.together import Follower


class RowRun(Run):
    """A run of rank 0, which leads."""

    split = True
    trainer: RowTrainer

    @classmethod
    def opened(
        cls,
        folder: Path,
        dataset: Dataset,
        recipe: Recipe,
        plan: PrivacyPlan,
        ledger: Ledger | None,
        lock: RunLock,
        ranks: Ranks,
        again: bool,
    ) -> RowRun:
        """A run as it begins, on all ranks at once; `again` if it is to go on from a checkpoint."""
        seed = secrets.randbits(63) if recipe.seed is None else recipe.seed
        about = {"plan": plan_to_json(plan), "recipe": recipe.settings(), "threads": torch.get_num_threads()}
        ranks.tell({**about, "split": True, "seed": seed, "again": again})
        return cls(folder, dataset, recipe, _trainer(dataset, recipe, plan, ledger, ranks, seed), lock)

    def __init__(self, folder: Path, dataset: Dataset, recipe: Recipe, trainer: RowTrainer, lock: RunLock):
        super().__init__(folder, dataset, recipe, trainer, lock)
        self.ranks = trainer.ranked

    def save(self) -> None:
        """A checkpoint of all ranks."""
        tensors, values = self._state()
        self.checkpoints.save(tensors, {**values, "split": True}, self.ranks.collect())

    def restore(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Go on from a checkpoint, all ranks."""
        self.ranks.hand(self.checkpoints.load_parts())
        super().restore(tensors, values)

    def lead(self) -> None:
        """Tell the others the frequencies that were released: one number for each item, once in a run."""
        found = self.frequencies
        self.ranks.tell(None if found is None else {"source": found.source, "floor": found.floor})
        if found is not None:
            self.ranks.tell_bytes(found.probability.astype("<f8").tobytes())

    def _agreed(self, due: bool) -> bool:
        return bool(self.ranks.tell(due))

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = self.trainer.model.state_dict()
        part = self.trainer.model.part
        assert part is not None
        whole = {
            name: value.new_empty(part.count, value.shape[1])
            for name, value in weights.items()
            if name in self.trainer.split
        }
        for name, table in whole.items():
            table[part.own] = weights[name]
        for rank, given in enumerate(self.ranks.collect(), 1):
            for name, rows in from_safetensors(given).items():
                whole[name][Rows(part.count, rank, part.size).own] = rows
        return {**weights, **whole}


class RowFollower(Follower):
    """What rank 1, 2, ... have of such a run."""

    trainer: RowTrainer

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Make the steps that are left, in step with rank 0. True when the model is released; False if told to stop."""
        ranks = self.trainer.ranked
        for _ in self.trainer.run():
            if ranks.agree(should_stop()):
                self.give_state()
                return bool(ranks.tell())
            if ranks.tell():
                self.give_state()
        self.trainer.finish()
        weights = self.trainer.model.state_dict()
        ranks.give(pack({name: weights[name] for name in self.trainer.split}))
        return bool(ranks.tell())

    def give_state(self) -> None:
        """For a checkpoint of rank 0's. It tells the noise that comes: as secret as the checkpoint."""
        tensors, values = self.trainer.state()
        self.trainer.ranked.give(pack({**tensors, "values": _text(to_json(values))}))

    def take_state(self) -> None:
        """What `give_state` gave."""
        tensors = from_safetensors(self.trainer.ranked.hand())
        values = json.loads(tensors.pop("values").numpy().tobytes())
        self.trainer.restore(tensors, values)


def follow_rows(ranks: Ranks, dataset: Dataset, about: dict[str, Any]) -> RowFollower:
    """On all ranks but 0: their part of a run that rank 0 opens."""
    recipe, plan = Recipe.model_validate(about["recipe"]), plan_from_json(about["plan"])
    torch.set_num_threads(about["threads"])
    follower = RowFollower(_trainer(dataset, recipe, plan, None, ranks, about["seed"]))
    if about["again"]:
        follower.take_state()
    else:
        follower.give_state()
    if (known := ranks.tell()) is not None:
        probability = np.frombuffer(ranks.tell_bytes(), dtype="<f8").astype(np.float64)
        frequencies = ItemFrequencies(probability, known["source"], known["floor"])
        follower.trainer.choose(torch.from_numpy(probability).float(), recipe.popularity_bias)
        set_errors(follower.trainer.model, plan, frequencies, recipe)
    return follower


def _trainer(
    dataset: Dataset, recipe: Recipe, plan: PrivacyPlan, ledger: Ledger | None, ranks: Ranks, seed: int
) -> RowTrainer:
    """The trainer of one rank. Its noise is from the system's entropy, or in a seeded run from a seed of this rank's."""
    torch.manual_seed(seed)  # initial weights and dropout; never the noise
    split = partial(Rows, rank=ranks.rank, size=ranks.size, group=ranks.tensors)
    return RowTrainer(
        recipe.build(len(dataset.catalogue), split),
        dataset.train(recipe.hold_out),
        plan,
        recipe.optimisation(),
        PoissonSampler(plan.users, plan.rate, recipe.seed),
        noise_source(recipe.noise, seed_of(recipe.seed, ranks.rank)) if plan.private else None,
        ledger,
        ranks,
        about=recipe.model_dump_json(),
    )


def _text(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
