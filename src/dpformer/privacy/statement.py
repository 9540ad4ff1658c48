"""The privacy statement as data: what is promised, on what assumptions, and what is not.

`privacy.json` follows a JSON schema (`json_schema`, committed as docs/privacy.schema.json). `build_statement` makes it from the
plan and from what the ledger says was charged, never from what was merely intended. Its words are in `wording`.
"""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dpformer import __version__, notebook
from dpformer.errors import PrivacyError
from dpformer.privacy import wording
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.attack_bounds import attack_bound, bound_from
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.ledger import Account
from dpformer.privacy.parts import (
    AccountantPart,
    AccountPart,
    AtLeastOne,
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
from dpformer.privacy.plan import PrivacyPlan
from dpformer.privacy.tuning import Tuning, tuned_epsilon

ACCOUNTING = "dp-accounting"
PACKAGES = (ACCOUNTING, "numpy", "scipy", "torch")


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
    account: AccountPart | None = None
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

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<PrivacyStatement: {self.text().splitlines()[0]}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        title, *lines = self.text().splitlines()
        named = (line.partition(": ") for line in lines)
        rows = [(name, text) if text and len(name) < 40 else ("", name + colon + text) for name, colon, text in named]
        return notebook.table(title, (), rows)


@dataclass(frozen=True)
class Circumstances:
    """What a statement says beside plan and ledger.

    assumed_public: what is assumed public beside the number of users. assumptions: what the guarantee rests on without a proof.
    insecure: reasons not to rely on the guarantee; that of a seeded run is added automatically.
    account: of the people, if the run was charged to one.
    """

    data: DataPart
    seeded: bool = False
    assumed_public: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    insecure: tuple[str, ...] = ()
    account: AccountPart | None = None


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
        users_declared=plan.declared,
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
        assumed_public=(wording.users_in_words(plan.users, plan.declared), *about.assumed_public),
        assumptions=about.assumptions,
        tuning=tuning,
        not_covered=wording.NOT_COVERED,
        insecure=(wording.SEEDED, *about.insecure) if mode == "seeded" else about.insecure,
        ledger=LedgerPart(run_id=account.run_id, **asdict(account.position)) if account else None,
        account=about.account,
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
