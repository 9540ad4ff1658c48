"""Build the privacy statement of a run from its plan and what its ledger says was charged, never from what was intended."""

import math
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Literal

import numpy as np

from dpformer import __version__
from dpformer.errors import PrivacyError
from dpformer.privacy import wording
from dpformer.privacy.account import Spending, composed, together
from dpformer.privacy.accounting import Charge, Epsilon, epsilon
from dpformer.privacy.attack_bounds import attack_bound, bound_from
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.ledger import Account
from dpformer.privacy.plan import PrivacyPlan
from dpformer.privacy.statement import (
    AccountantPart,
    AccountPart,
    AlonePart,
    AttackPart,
    DataPart,
    LedgerPart,
    NoisePart,
    PrivacyStatement,
    ReleasePart,
    StepsPart,
    TuningPart,
)
from dpformer.privacy.tuning import Tuning, tuned_epsilon

PACKAGES = ("dp-accounting", "numpy", "scipy", "torch")


@dataclass(frozen=True)
class Conditions:
    """What a statement takes for granted or leaves out. A model that is made of what a run released has them too."""

    assumed_public: tuple[str, ...] = ()
    outside_guarantee: tuple[str, ...] = ()
    insecure: tuple[str, ...] = ()

    @classmethod
    def of(cls, statement: PrivacyStatement) -> "Conditions":
        """Those of a statement, with those that it has from earlier runs."""
        return cls(statement.assumed_public, statement.data.outside_guarantee, statement.insecure)


def inherited(own: tuple[str, ...], earlier: tuple[str, ...]) -> tuple[str, ...]:
    """The conditions of a run, and those of earlier runs that it does not have by itself."""
    marked = (one if one.startswith(wording.EARLIER) else wording.EARLIER + one for one in earlier if one not in own)
    return tuple(dict.fromkeys([*own, *marked]))


@dataclass(frozen=True)
class Circumstances:
    """What a statement says beside plan and ledger.

    assumed_public: what is assumed public beside the number of users. assumptions: what the guarantee rests on without a proof.
    account: of the people, just after the charge of this run, if it was charged to one. prior: where the model also uses what
    earlier runs of that account released, their conditions; what is stated is of all of them together.
    """

    data: DataPart
    seeded: bool = False
    assumed_public: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    account: Spending | None = None
    prior: Conditions | None = None


def build_statement(
    plan: PrivacyPlan, account: Account | None, about: Circumstances, tuning: TuningPart | Tuning
) -> PrivacyStatement:
    """The statement of a run, from its plan and what its ledger says was charged.

    `account` is None only for a run without privacy (epsilon inf). With a `Tuning` the run is the best of a random number of
    trials of this same plan, and everything stated includes them.
    """
    if plan.private and account is None:
        raise PrivacyError("a private run needs its ledger for the statement: it records what was spent")
    if account is not None and account.plan != plan:
        raise PrivacyError("the ledger is of another plan than the statement's; do not trust this run")
    charges = plan.charges() if account is None else account.spent()
    delta, threshold = plan.delta, plan.threshold_delta
    spent, alone = epsilon(charges, delta, threshold), None
    if about.prior is not None:
        if about.account is None or isinstance(tuning, Tuning):
            raise PrivacyError(
                "the model uses what earlier runs released: charge all of them to one account of people, without accounted tuning"
            )
        alone = AlonePart(epsilon=spent.epsilon, delta=delta)
        delta, (charges, threshold) = about.account.cap.delta, composed(about.account.runs)
        spent = _spent(charges, delta, threshold)
    headline, note = spent.epsilon, spent.note
    if isinstance(tuning, Tuning):
        # A guarantee at delta holds at the larger 1/users too, and its one point bounds every attack.
        headline = at_one_over_n = tuned_epsilon(charges, tuning, delta, threshold)
        attack = bound_from(np.array([headline]), np.array([delta]))
        note = f"{note} {wording.TUNED}".strip()
        tuning = TuningPart(
            kind="accounted", mean_trials=tuning.trials, distribution=tuning.distribution, epsilon=headline
        )
    else:
        at_one_over_n = _spent(charges, 1 / plan.users, threshold).epsilon
        attack = attack_bound(charges, delta, threshold_delta=threshold)
    sigma_1 = gaussian_multiplier(plan.epsilon, plan.delta - plan.threshold_delta)
    releases = (one for one in plan.releases if account is None or one.name in account.released)
    users = f"a declared population of {plan.users:,} users" if plan.declared else "the number of users"
    earlier = about.prior or Conditions()
    mode: Literal["exact", "seeded", "none"] = "none" if not plan.private else "seeded" if about.seeded else "exact"
    return PrivacyStatement(
        private=plan.private,
        epsilon=headline,
        delta=delta,
        budget=plan.epsilon,
        epsilon_at_delta_1_over_users=at_one_over_n,
        unit=wording.UNIT,
        users=plan.users,
        users_declared=plan.declared,
        data=about.data.model_copy(
            update={
                "threshold_delta": plan.threshold_delta,
                "outside_guarantee": inherited(about.data.outside_guarantee, earlier.outside_guarantee),
            }
        ),
        steps=_steps(plan, plan.steps if account is None else account.steps_charged) if plan.steps else None,
        noise=NoisePart(mode=mode, generator=wording.GENERATORS[mode], grid=wording.GRID if plan.private else ""),
        releases=tuple(_release(one, sigma_1) for one in releases),
        accountant=AccountantPart(
            used=spent.accountant,
            library="dp_accounting",
            version=version("dp-accounting"),
            pld=spent.pld,
            rdp=spent.rdp,
            note=note,
        ),
        attack=AttackPart(**asdict(attack), reading=attack.sentence()),
        assumed_public=inherited((users, *about.assumed_public), earlier.assumed_public),
        assumptions=about.assumptions,
        tuning=tuning,
        not_covered=wording.NOT_COVERED,
        insecure=inherited((wording.SEEDED,) if mode == "seeded" else (), earlier.insecure),
        ledger=LedgerPart(run_id=account.run_id, **asdict(account.position)) if account else None,
        account=account_part(about.account) if about.account else None,
        alone=alone,
        versions={"dpformer": __version__, "python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
    )


def _spent(charges: tuple[Charge, ...], delta: float, threshold: float) -> Epsilon:
    if threshold < delta:
        return epsilon(charges, delta, threshold)
    return Epsilon(math.inf, delta, "pld", math.inf, math.inf, "the thresholds of earlier runs took all of delta")


def _steps(plan: PrivacyPlan, charged: int) -> StepsPart:
    return StepsPart(
        planned=plan.steps,
        charged=charged,
        sampler=plan.sampler,
        sampling_rate=plan.rate,
        expected_batch_size=plan.batch_size,
        noise_multiplier=plan.noise_multiplier,
    )


def _release(charge: Charge, sigma_1: float) -> ReleasePart:
    sigma = charge.noise_multiplier
    share = min((sigma_1 / sigma) ** 2, 1.0) if sigma else 0.0
    return ReleasePart(name=charge.name, noise_multiplier=sigma, share=share)


def account_part(spending: Spending) -> AccountPart:
    """The account whose last charge is the run's own."""
    cap, time = spending.cap, spending.runs[-1].time
    return AccountPart(
        id=spending.id,
        runs=len(spending.runs),
        hash=spending.hashes[-1],
        epsilon=together(spending.runs, cap.delta),
        delta=cap.delta,
        cap=cap.epsilon,
        period=time[:4] if cap.per else "",
        epsilon_in_period=together(spending.counted(time), cap.delta),
    )
