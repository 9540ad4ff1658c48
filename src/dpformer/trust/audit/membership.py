"""The released model attacked from outside, as a person would: is this user's loss lower than it would be anyway?

Three sets of users: members, on whom the model is trained; outsiders; and others, on whom the attacker trains a reference
of his own, without privacy. The score of a user is loss(reference) - loss(model): how much easier the user is for the model
than users like that are in general. Tried on the private model and on one trained without privacy, where it should succeed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import beta, norm, rankdata

from dpformer.artifact import load
from dpformer.fit.dpsgd import Trainer
from dpformer.fit.run import Run
from dpformer.privacy import PrivacyStatement
from dpformer.trust.audit.setting import Setting

CONFIDENCE = 0.99
FALSE_POSITIVES = 0.05


@dataclass(frozen=True)
class Attack:
    """How well members are told from outsiders. `advantage_low` is a lower confidence limit of true minus false positives."""

    model: str
    epsilon: float | str
    members: int
    auc: float
    auc_low: float
    true_positives: float
    advantage: float
    advantage_low: float
    claimed_advantage: float

    @property
    def passed(self) -> bool:
        """Whether the attack stays within what the statement allows any attack."""
        return self.advantage_low <= self.claimed_advantage

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "passed": self.passed}


def attack_models(setting: Setting, folder: Path, users: int = 300) -> list[Attack]:
    """Train a private and a non-private model on members, a reference on others, and attack both."""
    users = min(users, len(setting.dataset.sequences) // 3)
    all_users = setting.sequences(3 * users, 11)
    members, outsiders, others = all_users[:users], all_users[users : 2 * users], all_users[2 * users :]
    reference = _train(setting.begin(folder / "reference", others, epsilon=float("inf")))
    difficulty = [_losses(reference, part) for part in (members, outsiders)]
    attacks = []
    for name, changes in (("private", {}), ("not private", {"epsilon": float("inf")})):
        run = _train(setting.begin(folder / name.replace(" ", "-"), members, **changes))
        scores = [d - _losses(run, part) for d, part in zip(difficulty, (members, outsiders), strict=True)]
        attacks.append(judge(name, load(run.folder).statement, *scores))
    return attacks


def _train(run: Run) -> Run:
    run.train()
    return run


def _losses(run: Run, sequences: list[np.ndarray]) -> np.ndarray:
    """Each user's loss on the items that training would see, by the released model."""
    trainer: Trainer = run.trainer
    trainer.model.load_state_dict(load(run.folder).model.state_dict())
    trainer.model.eval()
    kept = [s[:-2] if len(s) >= 3 else s for s in sequences]
    losses = []
    with torch.no_grad():
        for items in kept:
            part = torch.from_numpy(items[-(trainer.how.max_length + 1) :].astype(np.int64))[None]
            losses.append(float(trainer.worker.losses(part)))
    return np.array(losses)


def judge(name: str, statement: PrivacyStatement, members: np.ndarray, outsiders: np.ndarray) -> Attack:
    """Figures of an attack from its scores. The threshold is the median of all: no label is used to choose it."""
    n, m = len(members), len(outsiders)
    auc = (rankdata(np.concatenate([members, outsiders]))[:n].sum() - n * (n + 1) / 2) / (n * m)
    # The variance of the statistic of Mann and Whitney is at most that of auc (1 - auc) / min(n, m).
    error = np.sqrt(auc * (1 - auc) / min(n, m))
    strict = np.quantile(outsiders, 1 - FALSE_POSITIVES)
    threshold = np.median(np.concatenate([members, outsiders]))
    hits, alarms = int((members > threshold).sum()), int((outsiders > threshold).sum())
    tail = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.isf(tail, alarms + 1, m - alarms)) if alarms < m else 1.0
    return Attack(
        name,
        statement.epsilon,
        n,
        float(auc),
        float(auc - norm.isf(tail) * error),
        float((members > strict).mean()),
        hits / n - alarms / m,
        low - high,
        statement.attack.advantage,
    )
