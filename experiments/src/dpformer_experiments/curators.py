"""Curators for experiments, with seeded noise, so that figures can be reproduced. Never for a model that is published."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dpformer.data import Sequences
from dpformer.errors import PrivacyError
from dpformer.privacy import Curator, Keys, PrivacyPlan, create_ledger
from dpformer.privacy.ledger import Ledger


class KeysByPlace(Keys):
    """Keys whose noise depends on the seed and the place of the answer alone, not on the sum, for runs that are compared.

    Each run by itself has the noise of any run. Two runs of one seed have the same noise, so their difference is of what they
    do differently. Never for people whose models are published: two answers at one place would differ by their sums.
    """

    def noise(self, array: str, digest: bytes) -> bytes:
        """The key of the noise on an array of the answer at this place."""
        return super().noise(array, b"")


def curator_by_place(people: Sequences, plan: PrivacyPlan, ledger: Ledger | None, keys: Keys) -> Curator[Sequences]:
    """A Curator of a seeded run whose noise is that of `KeysByPlace`."""
    if not keys.seeded:
        raise PrivacyError("noise by place is for runs with a seed; set one")
    return Curator(people, plan, ledger, KeysByPlace.restored(keys.state()))


@contextmanager
def seeded_curator(people: Sequences, plan: PrivacyPlan, seed: int) -> Iterator[Curator[Sequences]]:
    """A Curator over these people with `Keys(seed)`; its ledger is temporary. Never use it for a model that is published."""
    with tempfile.TemporaryDirectory(prefix="dpformer-curator-") as folder, ExitStack() as stack:
        ledger = stack.enter_context(create_ledger(Path(folder), plan)) if plan.private else None
        yield Curator(people, plan, ledger, Keys(seed))
