"""The privacy statement as data: what is promised, on what assumptions, and what is not.

`privacy.json` follows a JSON schema (`json_schema`, committed as docs/privacy.schema.json). `build_statement` makes it from the
plan and from what the ledger says was charged, never from what was merely intended. Its words are in `wording`.
"""

import math
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dpformer import __version__
from dpformer.errors import PrivacyError
from dpformer.privacy import wording
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.attack_bounds import attack_bound, bound_from
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.ledger import Account
from dpformer.privacy.plan import PrivacyPlan
from dpformer.privacy.tuning import Tuning, tuned_epsilon

Probability = Annotated[float, Field(ge=0, le=1)]
Multiplier = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
# JSON has no number for infinity.
EpsilonValue = Annotated[
    Annotated[float, Field(ge=0)] | Literal["inf"], BeforeValidator(lambda value: "inf" if value == math.inf else value)
]


ACCOUNTING = "dp-accounting"
PACKAGES = (ACCOUNTING, "numpy", "scipy", "torch")


class Part(BaseModel):
    """Base of all parts: they cannot be changed, and have no other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AccountantPart(Part):
    """The accountant used. `pld` and `rdp` are both shown; "inf" where one has no bound."""

    used: Literal["pld", "rdp", "gaussian"]
    library: str
    version: str
    pld: EpsilonValue
    rdp: EpsilonValue
    note: str = ""


class NoisePart(Part):
    """How noise was made, and on what grid."""

    mode: Literal["exact", "seeded", "none"]
    generator: str
    grid: str


class StepsPart(Part):
    """Training steps: planned, and charged in the ledger (what epsilon is computed from)."""

    planned: AtLeastOne
    charged: Count
    sampler: Literal["poisson", "full"]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    expected_batch_size: AtLeastOne
    noise_multiplier: Multiplier


class ReleasePart(Part):
    """An answer that is not a step: its noise, and its share of the Gaussian budget of the whole."""

    name: str
    noise_multiplier: Multiplier
    share: Probability


class TuningPart(Part):
    """How settings were chosen.

    "undeclared": not said. "none": fixed beforehand. "public": on public data. "listed": on this data, not accounted for;
    `configurations` lists every one that was tried. "accounted": a random number of trials, paid for; epsilon includes it.
    """

    kind: Literal["undeclared", "none", "public", "listed", "accounted"]
    configurations: tuple[str, ...] = ()
    mean_trials: float | None = None
    distribution: str | None = None
    epsilon: EpsilonValue | None = None

    @model_validator(mode="after")
    def _complete(self) -> "TuningPart":
        if self.kind == "listed" and not self.configurations:
            raise ValueError("tuning that is listed must list the configurations tried")
        if self.kind == "accounted" and None in (self.mean_trials, self.distribution, self.epsilon):
            raise ValueError("tuning that is accounted needs mean_trials, distribution and epsilon")
        return self


class AttackPart(Part):
    """An upper bound on every membership attack on what was released."""

    false_positive_rate: Probability
    true_positive_rate: Probability
    advantage: Probability
    reading: str


class LedgerPart(Part):
    """The ledger that the statement was made from."""

    run_id: str
    entries: Count
    hash: str


class DataPart(Part):
    """What was decided by the data.

    catalogue: "public", a list given from outside; "log", the items that occur in the log, *assumed* public; "private", items
    chosen by noisy counts above a threshold. threshold_delta: the part of delta that this threshold takes.
    outside_guarantee: what was done to the data that the guarantee does not cover. trained_on: which events were used.
    """

    catalogue: Literal["public", "log", "private"]
    threshold_delta: Annotated[float, Field(ge=0, lt=1)] = 0.0
    outside_guarantee: tuple[str, ...] = ()
    trained_on: str = "all events"


class PrivacyStatement(Part):
    """All that is needed to judge the guarantee of a published model. users_declared: `users` was given, and not counted."""

    format: Literal[2] = 2
    private: bool
    epsilon: EpsilonValue
    delta: Annotated[float, Field(gt=0, lt=1)]
    budget: EpsilonValue
    epsilon_at_delta_1_over_users: EpsilonValue
    unit: str
    neighbours: str = wording.NEIGHBOURS
    users: AtLeastOne
    users_declared: bool = False
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
        return wording.in_words(self)


@dataclass(frozen=True)
class Circumstances:
    """What a statement says beside plan and ledger.

    assumed_public: what is assumed public beside the number of users. assumptions: what the guarantee rests on without a proof.
    users_declared: the plan's users are a population that was declared, in place of the number in the data.
    insecure: reasons not to rely on the guarantee; that of a seeded run is added automatically.
    """

    data: DataPart
    seeded: bool = False
    assumed_public: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    insecure: tuple[str, ...] = ()
    users_declared: bool = False


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
    spent = epsilon(charges, delta, threshold)
    headline, note = spent.epsilon, spent.note
    if isinstance(tuning, Tuning):
        left = delta - tuning.trials * threshold  # each trial has a threshold of its own
        if left <= 0:
            each = f"{tuning.trials:g} trials with a threshold delta of {threshold:g} each"
            raise PrivacyError(f"{each} leave nothing of delta {delta:g}; lower the trials")
        # A guarantee at delta holds at the larger 1/users too, and its one point bounds every attack.
        headline = at_one_over_n = tuned_epsilon(charges, tuning, left)
        attack = bound_from(np.array([headline]), np.array([delta]))
        note = f"{note} {wording.TUNED}".strip()
        tuning = TuningPart(
            kind="accounted", mean_trials=tuning.trials, distribution=tuning.distribution, epsilon=headline
        )
    else:
        at_one_over_n = epsilon(charges, 1 / plan.users, threshold).epsilon
        attack = attack_bound(charges, delta, threshold_delta=threshold)
    mode: Literal["exact", "seeded", "none"] = "none" if not plan.private else "seeded" if about.seeded else "exact"
    return PrivacyStatement(
        private=plan.private,
        epsilon=headline,
        delta=delta,
        budget=plan.epsilon,
        epsilon_at_delta_1_over_users=at_one_over_n,
        unit=wording.UNIT,
        users=plan.users,
        users_declared=about.users_declared,
        data=about.data.model_copy(update={"threshold_delta": threshold}),
        steps=_steps(plan, account),
        noise=NoisePart(mode=mode, generator=wording.GENERATORS[mode], grid=wording.GRID if plan.private else ""),
        releases=_releases(plan, account),
        accountant=AccountantPart(
            used=spent.accountant,
            library="dp_accounting",
            version=version(ACCOUNTING),
            pld=spent.pld,
            rdp=spent.rdp,
            note=note,
        ),
        attack=AttackPart(**asdict(attack), reading=attack.sentence()),
        assumed_public=(wording.users_in_words(plan.users, about.users_declared), *about.assumed_public),
        assumptions=about.assumptions,
        tuning=tuning,
        not_covered=wording.NOT_COVERED,
        insecure=(wording.SEEDED, *about.insecure) if mode == "seeded" else about.insecure,
        ledger=LedgerPart(run_id=account.run_id, **asdict(account.position)) if account else None,
        versions={"dpformer": __version__, "python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
    )


def _steps(plan: PrivacyPlan, account: Account | None) -> StepsPart | None:
    if not plan.steps:
        return None
    return StepsPart(
        planned=plan.steps,
        charged=plan.steps if account is None else account.steps_charged,
        sampler=plan.sampler,
        sampling_rate=plan.rate,
        expected_batch_size=plan.batch_size,
        noise_multiplier=plan.noise_multiplier,
    )


def _releases(plan: PrivacyPlan, account: Account | None) -> tuple[ReleasePart, ...]:
    sigma_1 = gaussian_multiplier(plan.epsilon, plan.delta - plan.threshold_delta)
    made = {r.name: r.noise_multiplier for r in plan.releases if account is None or r.name in account.released}
    return tuple(
        ReleasePart(name=name, noise_multiplier=sigma, share=min((sigma_1 / sigma) ** 2, 1.0) if sigma else 0.0)
        for name, sigma in made.items()
    )


def parse_statement(text: str | bytes) -> PrivacyStatement:
    """Read a `privacy.json`; a field that is missing, unknown or out of range is a `PrivacyError`."""
    try:
        return PrivacyStatement.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "the statement"
        raise PrivacyError(f"privacy.json: {where}: {first['msg']}; write it anew from the run") from problem


def json_schema() -> dict[str, Any]:
    """The JSON schema of `privacy.json`."""
    return PrivacyStatement.model_json_schema(mode="serialization")
