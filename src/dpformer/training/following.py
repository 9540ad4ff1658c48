"""A run of `PrivateTraining` on ranks 1, 2, ... of several: each computes its part of every sum, and makes the same steps.

The folder, the Curator and the noise are rank 0's. Before each sum the others get its weights; then its gradients with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_safetensors
from torch import Tensor

from dpformer.errors import PrivacyError
from dpformer.privacy import Keys, PrivacyPlan, PrivacyStatement, parse_statement
from dpformer.privacy.build import Circumstances
from dpformer.privacy.plan import plan_from_json
from dpformer.training.clipped_sum import trainable
from dpformer.training.module_sum import ModuleSum
from dpformer.training.people import People
from dpformer.training.run import MakeCurator, TrainingRun
from dpformer.training.watch import Movement


class FollowingRun(TrainingRun):
    """Takes part in the run that rank 0 has. It writes nothing, and holds neither keys nor ledger."""

    _open, _stated = True, None

    def _open_folder(self) -> None:
        """It is on rank 0."""

    def open(
        self, people: People, plan: Callable[[], PrivacyPlan], keys: Callable[[], Keys], make_curator: MakeCurator
    ) -> PrivacyPlan:
        """Get the state of rank 0's run, and its plan."""
        self.ranks.gather(self._contents())
        about = self.ranks.broadcast()
        self.put(from_safetensors(self.ranks.broadcast_bytes()), about["state"])
        torch.set_num_threads(about["threads"])
        self._open, self._stated = about["statement"] is None, about["statement"]
        return plan_from_json(about["plan"])

    @property
    def is_open(self) -> bool:
        """Are there steps to make?"""
        return self._open

    def start(self, query: ModuleSum) -> tuple[list[np.ndarray], bytes]:
        """Begin the sum that rank 0 orders."""
        return query.start_part(self.ranks.broadcast())

    def gradients(self, query: ModuleSum, batch_size: float) -> list[Tensor]:
        """Send this part of the sum; rank 0's gradients, with noise."""
        query.collected()
        made = [torch.empty_like(p) for _, p in trainable(self.model)]
        self.ranks.share_(made)
        return made

    def save(self) -> None:
        """Rank 0 saves."""

    def statement(self, about: Circumstances) -> PrivacyStatement:
        """The released statement, when the run is finished."""
        if self._stated is None:
            raise PrivacyError("rank 0 has the ledger: read the statement there, or at the end of the run")
        return parse_statement(self._stated.encode())

    def finish(self, about: Circumstances) -> None:
        """Wait until rank 0 has released the model."""
        end: dict[str, Any] = self.ranks.broadcast()
        self._stated, moved = end["statement"], end["movement"]
        self.movement = Movement(moved["distance"], moved["start_norm"], tuple(moved["still"]))
        self.close()

    def close(self) -> None:
        """Take part no longer."""
        self._open = False
