"""The loop where no rank has the tables: all make the same step on the same users, each with its rows of the tables.

A step is that of `Trainer`, with collectives where ranks must agree: who is drawn, the norms (`dpformer.clipping.rows`), the
ledger and the noise (`dpformer.training.rows`). The optimiser's state is of the rows that a rank has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from dpformer.clipping.rows import RowCrossEntropy
from dpformer.data import PoissonSampler, Sequences
from dpformer.errors import PrivacyError
from dpformer.models.base import SequenceModel
from dpformer.privacy import Ledger, NoiseSource, PrivacyPlan
from dpformer.training.ranks import Ranks
from dpformer.training.rows import RankLedger, RowNoise, begin_alike, split_names
from dpformer.training.trainer import Optimisation, Trainer, digest


class RowTrainer(Trainer):
    """A `Trainer` for a model with `split` tables. Every rank has a noise source, none the same; rank 0 alone has a ledger.

    Making one, and each step, is a collective of all ranks. `state` is this rank's.
    """

    def __init__(
        self,
        model: SequenceModel,
        train: Sequences,
        plan: PrivacyPlan,
        how: Optimisation,
        sampler: PoissonSampler,
        noise: NoiseSource | None,
        ledger: Ledger | None,
        ranks: Ranks,
        about: str = "",
    ) -> None:
        if model.part is None or (model.part.rank, model.part.size) != (ranks.rank, ranks.size):
            raise PrivacyError("the model is not split over these ranks; build it with their split")
        self.split = split_names(model)
        begin_alike(model, ranks)
        shared = RankLedger(plan, ranks, ledger) if plan.private else None
        own = None if noise is None else RowNoise(noise, ranks, self.split)
        super().__init__(model, train, plan, how, sampler, own, shared, about)
        self.ranked = ranks
        self.worker.head = RowCrossEntropy(model.part)
        if shared is not None:
            shared.alike = self._alike
            # Other machines, or fewer, may round otherwise: made again, it must be this very sum.
            shared.also = lambda: digest(*(_array(p.grad) for p in model.parameters() if p.grad is not None))

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Rank 0's draw, on all ranks."""
        users, _ = super()._draw()
        users = self.ranked.deal([users] * self.ranked.size)
        return users, users[self._sequences.lengths[users] > 1]

    def _alike(self) -> str:
        """What all ranks must have in common before a step is paid for."""
        shared = [_array(value) for name, value in self.model.state_dict().items() if name not in self.split]
        return f"{self._about} {digest(*shared)}"


def _array(value: Tensor) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy()
