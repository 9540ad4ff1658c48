"""The whole audit of one setting, in the order of the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.privacy import Sample
from dpformer.privacy.query import grid_step
from dpformer.trust.audit.controls import Control, canary_sequence, honest_sampling, run_controls
from dpformer.trust.audit.membership import Attack, attack_models
from dpformer.trust.audit.one_run import OneRun, audit_training
from dpformer.trust.audit.setting import Setting
from dpformer.trust.audit.step_audit import StepAudit
from dpformer.trust.audit.steps import Canary, measure, trials_for
from dpformer.trust.verify.people import emptied

CLAIM, LESS_NOISE = 1.0, 0.1
"""The defect of the one-run audit's own control: a tenth of the noise that a claim of epsilon 1 needs."""


@dataclass(frozen=True)
class Audit:
    """Everything that was found."""

    setting: str
    seed: int
    step: StepAudit
    sampling: tuple[bool, str]
    one_run: OneRun
    attacks: list[Attack]
    controls: list[Control]

    @property
    def problems(self) -> list[str]:
        """What contradicts the claim, and which controls were not caught."""
        problems = []
        if not self.step.passed:
            problems.append(
                f"single steps: mu in [{self.step.low:.3f}, {self.step.high:.3f}], claimed {self.step.claimed_mu:.3f}"
            )
        if not self.sampling[0]:
            problems.append(f"the sampler is not Poisson: {self.sampling[1]}")
        if not self.one_run.passed:
            problems.append("the one-run audit refutes the claimed epsilon")
        problems += [f"the attack on the {a.model} model exceeds the claim" for a in self.attacks if not a.passed]
        return problems + [f"control not caught: {control.name}" for control in self.controls if not control.caught]

    @property
    def passed(self) -> bool:
        """Whether the claim stands and every control was caught."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "setting": self.setting,
            "seed": self.seed,
            "passed": self.passed,
            "problems": self.problems,
            "step": {**asdict(self.step), "passed": self.step.passed},
            "sampling": {"passed": self.sampling[0], "found": self.sampling[1]},
            "one_run": self.one_run.to_json(),
            "membership": [attack.to_json() for attack in self.attacks],
            "controls": [control.to_json() for control in self.controls],
        }


def audit(
    setting: Setting,
    canaries: int = 400,
    users: int = 300,
    trials: int | None = None,
    on_part: Callable[[str], None] = lambda name: None,
) -> Audit:
    """Audit single steps, a whole training and the released model, with controls. Nothing of it is private or released."""
    with tempfile.TemporaryDirectory(prefix="dpformer-audit-") as name:
        place = Path(name)
        on_part("single steps and controls")
        step, controls = _steps(setting, place / "steps", trials)
        on_part("a whole training with canaries")
        one_run = audit_training(setting, place / "canaries", canaries)
        on_part("a whole training with too little noise")
        controls.append(_less_noise(setting, place / "less-noise", canaries))
        on_part("membership attack on a private and a non-private model")
        attacks = attack_models(setting, place / "membership", users)
    controls.append(_works(attacks[1]))
    return Audit(setting.name, setting.seed, step, honest_sampling(setting.seed), one_run, attacks, controls)


def _steps(setting: Setting, folder: Path, trials: int | None) -> tuple[StepAudit, list[Control]]:
    canary = np.append(canary_sequence(setting.items, 8, setting.seed), [1, 1])
    run = setting.begin(folder, [*setting.sequences(12, 5), canary])
    run.close()
    trainer, people = run.trainer, run.dataset.train(run.recipe.hold_out)
    query, all_users = trainer.query, np.arange(len(people))
    grid = grid_step(query.bound, query.numbers)
    trainer.model.train()
    with_canary = query.sum(people, Sample(all_users, bytes(32)), grid)
    others = query.sum(emptied(people, [len(people) - 1]), Sample(all_users, bytes(32)), grid)
    own = {name: with_canary[name] - others[name] for name in others}
    seen = Canary(others, own, query.bound, query.sensitivity(grid))
    sigma = trainer.plan.noise_multiplier
    trials = trials or trials_for(sigma)
    return measure(seen, sigma, trials, setting.seed), run_controls(seen, sigma, trials, setting.seed)


def _less_noise(setting: Setting, folder: Path, canaries: int) -> Control:
    claim = replace(setting, recipe=setting.recipe.changed({"epsilon": CLAIM}))
    audited = audit_training(claim, folder, canaries, noise_scale=LESS_NOISE)
    seen = (
        f"{audited.correct} of {audited.guesses} right: mu above {audited.mu_low:.2f}, claimed {audited.claimed_mu:.2f}"
    )
    defect = "epsilon 1 claimed, and a tenth of its noise added"
    return Control("a whole training with too little noise", defect, seen, None, not audited.passed)


def _works(attack: Attack) -> Control:
    seen = f"AUC {attack.auc:.3f}, above {attack.auc_low:.3f}"
    return Control("no privacy at all", "a model trained without clipping and noise", seen, None, attack.auc_low > 0.5)
