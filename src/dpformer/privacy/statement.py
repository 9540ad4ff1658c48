"""The privacy statement: what is promised, on what assumptions, and what is not; for people and for machines.

`privacy.json` follows a JSON schema (`json_schema`, committed as docs/privacy.schema.json). `build_statement` makes it
from the plan and from what the ledger says was charged, never from what was merely intended.
"""

import math
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dpformer import __version__
from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.attack_bounds import attack_bound, bound_from
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.ledger import Account
from dpformer.privacy.plan import PrivacyPlan
from dpformer.privacy.statement_parts import (
    AccountantPart,
    AttackPart,
    DataPart,
    EpsilonValue,
    LedgerPart,
    NoisePart,
    Part,
    ReleasePart,
    StepsPart,
    TuningPart,
)
from dpformer.privacy.tuning import Tuning, tuned_epsilon

UNIT = "one user, with all of that user's events"
NEIGHBOURS = "the number of users stays, and one user's events are replaced by none"
NOT_COVERED = (
    "the history that a served user hands in to get recommendations: it is used, not learned from",
    "losses, gradient norms, clip rates, metrics on private data, logs: they carry no noise; do not publish them",
    "the state kept for resuming a run (weights, keys of the noise and of the samples): secret, and deleted when the run ends",
    "the person or company that runs the training: they hold the data",
)
GENERATORS = {
    "exact": "whole numbers with the law of a rounded ideal Gaussian, from ChaCha20 with a 256-bit key of OS entropy",
    "seeded": "whole numbers with the law of a rounded ideal Gaussian, from ChaCha20 with a key made from a given seed",
    "none": "no noise",
}
GRID = (
    "Every released number is a whole multiple of a public step: 2^-26 of the largest power of 2 up to the norm bound (finer "
    "above 2^24 numbers)"
)


class PrivacyStatement(Part):
    """All that one has to know to judge the guarantee of a released model."""

    format: Literal[2] = 2
    private: bool
    epsilon: EpsilonValue
    delta: Annotated[float, Field(gt=0, lt=1)]
    budget: EpsilonValue
    epsilon_at_delta_1_over_users: EpsilonValue
    unit: str
    neighbours: str = NEIGHBOURS
    users: Annotated[int, Field(ge=1)]
    data: DataPart
    steps: StepsPart | None
    noise: NoisePart
    releases: tuple[ReleasePart, ...]
    accountant: AccountantPart
    attack: AttackPart
    assumed_public: tuple[str, ...]
    assumptions: tuple[str, ...]
    tuning: TuningPart
    not_covered: tuple[str, ...]
    insecure: tuple[str, ...]
    ledger: LedgerPart | None
    versions: dict[str, str]

    @model_validator(mode="after")
    def _consistent(self) -> "PrivacyStatement":
        if self.private == (self.epsilon == "inf"):
            raise ValueError("private must be false exactly when epsilon is inf")
        if self.tuning.kind == "accounted" and self.tuning.epsilon != self.epsilon:
            raise ValueError("epsilon must include the tuning that is accounted")
        if self.noise.mode == "seeded" and not self.insecure:
            raise ValueError("a seeded run must say that it is insecure")
        return self

    def to_json(self) -> str:
        """The text of `privacy.json`."""
        return self.model_dump_json(indent=2) + "\n"

    def text(self) -> str:
        """The statement in words, a few lines."""
        from dpformer.privacy.wording import in_words  # it knows this module

        return in_words(self)


@dataclass(frozen=True)
class Circumstances:
    """What a statement says beside plan and ledger. `assumptions`: what the guarantee rests on and no proof covers.

    `assumed_public` is what the guarantee takes as known beside the number of users. `insecure` lists reasons not to rely on the
    guarantee; that of a seeded run is added by itself.
    """

    data: DataPart
    seeded: bool = False
    assumed_public: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    insecure: tuple[str, ...] = ()


def build_statement(
    plan: PrivacyPlan, account: Account | None, about: Circumstances, tuning: TuningPart | Tuning
) -> PrivacyStatement:
    """The statement of a run, from its plan and what its ledger says was charged.

    `account` is None only for a run without privacy (epsilon inf). With a `Tuning` the run is the best of a random number of
    trials of this same plan, and everything stated includes them.
    """
    if plan.private and account is None:
        raise PrivacyError("a private run needs its ledger for the statement; what was spent is not known without it")
    if account is not None and account.plan != plan:
        raise PrivacyError("the ledger is of another plan than the statement's; do not trust this run")
    charges = plan.charges() if account is None else account.spent()
    delta, threshold = plan.delta, plan.threshold_delta
    spent = epsilon(charges, delta, threshold)
    attack = attack_bound(charges, delta, threshold_delta=threshold)
    at_one_over_n = epsilon(charges, 1 / plan.users, threshold).epsilon
    headline, note, insecure = spent.epsilon, spent.note, about.insecure
    if isinstance(tuning, Tuning):
        # A guarantee at delta holds at the larger 1/users too, and its one point bounds every attack.
        # Each trial has a threshold of its own.
        left = delta - tuning.trials * threshold
        if left <= 0:
            raise PrivacyError(
                f"{tuning.trials:g} trials with a threshold delta of {threshold:g} each leave nothing of delta {delta:g}"
            )
        headline = at_one_over_n = tuned_epsilon(charges, tuning, left)
        attack = bound_from(np.array([headline]), np.array([plan.delta]))
        note = " ".join(
            [note, "One trial is shown here; the tuning is counted by RDP, and epsilon includes it."]
        ).strip()
        tuning = TuningPart(
            kind="accounted", mean_trials=tuning.trials, distribution=tuning.distribution, epsilon=_value(headline)
        )
    sigma_1 = gaussian_multiplier(plan.epsilon, delta - threshold) if plan.private else 0.0
    mode: Literal["exact", "seeded", "none"] = "none" if not plan.private else "seeded" if about.seeded else "exact"
    if mode == "seeded":
        insecure = ("the noise came from a known seed and can be subtracted: for research, never to release", *insecure)
    return PrivacyStatement(
        private=plan.private,
        epsilon=_value(headline),
        delta=plan.delta,
        budget=_value(plan.epsilon),
        epsilon_at_delta_1_over_users=_value(at_one_over_n),
        unit=UNIT,
        users=plan.users,
        data=about.data.model_copy(update={"threshold_delta": threshold}),
        steps=_steps(plan, account),
        noise=NoisePart(mode=mode, generator=GENERATORS[mode], grid=GRID if plan.private else ""),
        releases=tuple(
            ReleasePart(
                name=release.name,
                noise_multiplier=release.noise_multiplier,
                share=min((sigma_1 / release.noise_multiplier) ** 2, 1.0) if release.noise_multiplier else 0.0,
            )
            for release in plan.releases
            if account is None or release.name in account.released
        ),
        accountant=AccountantPart.model_validate(
            {
                "used": spent.accountant,
                "library": "dp_accounting",
                "version": version("dp-accounting"),
                "pld": _value(spent.pld),
                "rdp": _value(spent.rdp),
                "note": note,
            }
        ),
        attack=AttackPart(
            false_positive_rate=attack.false_positive_rate,
            true_positive_rate=attack.true_positive_rate,
            advantage=attack.advantage,
            reading=attack.sentence(),
        ),
        assumed_public=("the number of users", *about.assumed_public),
        assumptions=about.assumptions,
        tuning=tuning,
        not_covered=NOT_COVERED,
        insecure=insecure,
        ledger=LedgerPart(run_id=account.run_id, entries=account.position.entries, hash=account.position.hash)
        if account
        else None,
        versions={
            "dpformer": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("dp-accounting", "numpy", "scipy", "torch")},
        },
    )


def _steps(plan: PrivacyPlan, account: Account | None) -> StepsPart | None:
    if not plan.steps:
        return None
    return StepsPart(
        planned=plan.steps,
        charged=plan.steps if account is None else account.steps_charged,
        sampler="full" if plan.sampler == "full" else "poisson",
        sampling_rate=plan.rate,
        expected_batch_size=plan.batch_size,
        noise_multiplier=plan.noise_multiplier,
    )


def parse_statement(text: str | bytes) -> PrivacyStatement:
    """Read a `privacy.json`; a field that is missing, unknown or out of range is a `PrivacyError`."""
    try:
        return PrivacyStatement.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "the statement"
        raise PrivacyError(f"privacy.json: {where}: {first['msg']}; write it anew from the run") from problem


def _value(value: float) -> float | Literal["inf"]:
    return "inf" if math.isinf(value) else value


def json_schema() -> dict[str, Any]:
    """The JSON schema of `privacy.json`."""
    return PrivacyStatement.model_json_schema(mode="serialization")
