"""Curators for experiments: the noise is seeded so that figures can be reproduced, and the ledger is deleted afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dpformer.data import Sequences
from dpformer.privacy import Curator, Keys, PrivacyPlan, create_ledger


@contextmanager
def seeded_curator(people: Sequences, plan: PrivacyPlan, seed: int) -> Iterator[Curator[Sequences]]:
    """A Curator over these people with `Keys(seed)`; its ledger is temporary. Never use it for a model that is published."""
    with tempfile.TemporaryDirectory(prefix="dpformer-curator-") as folder, ExitStack() as stack:
        ledger = stack.enter_context(create_ledger(Path(folder), plan)) if plan.private else None
        yield Curator(people, plan, ledger, Keys(seed))
