"""The privacy statement: what is promised, on what assumptions, and what is not; for people and for machines.

`privacy.json` follows a JSON schema (`json_schema`, committed as docs/privacy.schema.json). `build_statement` makes it
from the plan and from what the ledger says was charged, never from what was merely intended.
"""

import math
import platform
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpformer import __version__
from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.ledger import Account
from dpformer.privacy.plan import PrivacyPlan
from dpformer.privacy.tradeoff import attack_bound, bound_from
from dpformer.privacy.tuning import Tuning, tuned_epsilon

UNIT = "one user, with all of that user's events"
NOT_COVERED = (
    "the history that a served user hands in to get recommendations: it is used, not learned from",
    "losses, gradient norms, clip rates, metrics on private data, logs: they carry no noise; do not publish them",
    "the state kept for resuming a run (weights, noise and sampler state): secret, and deleted when the run ends",
    "whoever runs the training: they hold the data",
)
GENERATORS = {
    "system": "SFC64 with 192 bits of OS entropy; float32 Gaussians, not hardened against floating-point attacks",
    "crypto": "ChaCha20 with a 256-bit key of OS entropy; float64 sums of four Gaussians (Holohan and Braghin 2021)",
    "seeded": "SFC64 from a given seed: whoever knows the seed can subtract the noise",
    "none": "no noise",
}

Probability = Annotated[float, Field(ge=0, le=1)]
EpsilonValue = Annotated[float, Field(ge=0)] | Literal["inf"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AccountantPart(_Part):
    """Who counted. `pld` and `rdp` are both shown; "inf" where one found no bound."""

    used: Literal["pld", "rdp", "gaussian"]
    library: str
    version: str
    pld: EpsilonValue
    rdp: EpsilonValue
    note: str = ""


class NoisePart(_Part):
    """The noise of the training steps: a multiple of the clip norm, and where it came from."""

    mode: Literal["system", "crypto", "seeded", "none"]
    generator: str
    multiplier: Annotated[float, Field(ge=0)]


class StepsPart(_Part):
    """Training steps: planned, and charged in the ledger (what epsilon is computed from)."""

    planned: Annotated[int, Field(ge=0)]
    charged: Annotated[int, Field(ge=0)]
    sampler: Literal["poisson", "full"]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    expected_batch_size: Annotated[int, Field(ge=1)]


class ReleasePart(_Part):
    """A one-shot Gaussian release: its noise, and its share of the Gaussian budget of the whole."""

    name: str
    noise_multiplier: Annotated[float, Field(ge=0)]
    share: Probability


class TuningPart(_Part):
    """How settings were chosen.

    "undeclared": nobody said. "none": fixed beforehand. "public": on public data. "listed": on this data, not accounted
    for; `configurations` lists every one that was tried. "accounted": a random number of trials, paid for; epsilon
    includes it.
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


class AttackPart(_Part):
    """An upper bound on every membership attack on what was released."""

    false_positive_rate: Probability
    true_positive_rate: Probability
    advantage: Probability
    reading: str


class LedgerPart(_Part):
    """The ledger that the statement was made from."""

    run_id: str
    entries: Annotated[int, Field(ge=0)]
    hash: str


class PrivacyStatement(_Part):
    """All that one has to know to judge the guarantee of a released model."""

    format: Literal[1] = 1
    private: bool
    epsilon: EpsilonValue
    delta: Annotated[float, Field(gt=0, lt=1)]
    budget: EpsilonValue
    epsilon_at_delta_1_over_users: EpsilonValue
    unit: str
    neighbours: Literal["add or remove one user"] = "add or remove one user"
    users: Annotated[int, Field(ge=1)]
    steps: StepsPart
    noise: NoisePart
    releases: tuple[ReleasePart, ...]
    accountant: AccountantPart
    attack: AttackPart
    assumed_public: tuple[str, ...]
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
        return _words(self)


def build_statement(
    plan: PrivacyPlan,
    account: Account | None,
    noise_mode: str,
    assumed_public: tuple[str, ...],
    tuning: TuningPart | Tuning,
    insecure: tuple[str, ...] = (),
) -> PrivacyStatement:
    """The statement of a run, from its plan and what its ledger says was charged.

    `account` is None only for a run without privacy (epsilon inf). `assumed_public` is what the guarantee takes as
    known beside the number of users, such as "the catalogue of items" or "item frequencies (assume-public)". `insecure`
    lists reasons not to rely on the guarantee; that of a seeded run is added by itself. With a `Tuning` the run is the
    best of a random number of trials of this same plan, and everything stated includes them.
    """
    if plan.private and account is None:
        raise PrivacyError("a private run needs its ledger for the statement; what was spent is not known without it")
    if account is not None and account.plan != plan:
        raise PrivacyError("the ledger is of another plan than the statement's; do not trust this run")
    mechanisms = plan.mechanisms() if account is None else account.spent()
    spent = epsilon(mechanisms, plan.delta)
    attack = attack_bound(mechanisms, plan.delta)
    headline, at_one_over_n, note = spent.epsilon, epsilon(mechanisms, 1 / plan.users).epsilon, spent.note
    if isinstance(tuning, Tuning):
        # A guarantee at delta holds at the larger 1/users too, and its one point bounds every attack.
        headline = at_one_over_n = tuned_epsilon(mechanisms, tuning, plan.delta)
        attack = bound_from(np.array([headline]), np.array([plan.delta]))
        note = " ".join(
            [note, "One trial is shown here; the tuning is counted by RDP, and epsilon includes it."]
        ).strip()
        tuning = TuningPart(
            kind="accounted", mean_trials=tuning.trials, distribution=tuning.distribution, epsilon=_value(headline)
        )
    sigma_1 = gaussian_multiplier(plan.epsilon, plan.delta) if plan.private else 0.0
    mode = noise_mode if plan.private else "none"
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
        steps=StepsPart(
            planned=plan.steps,
            charged=plan.steps if account is None else account.steps_charged,
            sampler="full" if plan.sampler == "full" else "poisson",
            sampling_rate=plan.rate,
            expected_batch_size=plan.batch_size,
        ),
        noise=NoisePart.model_validate(
            {"mode": mode, "generator": GENERATORS.get(mode, ""), "multiplier": plan.noise_multiplier}
        ),
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
        assumed_public=("the number of users", *assumed_public),
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


def _value(epsilon: float) -> float | Literal["inf"]:
    return "inf" if math.isinf(epsilon) else epsilon


def _words(s: PrivacyStatement) -> str:
    lines = []
    if s.insecure:
        lines += [f"INSECURE: {reason}" for reason in s.insecure]
    if not s.private:
        lines.append("NOT PRIVATE: trained without noise (epsilon inf). Anyone's data may be read from it.")
        return "\n".join(lines)
    lines += [
        f"({_number(s.epsilon)}, {s.delta:g})-differential privacy for {s.unit}; neighbours: {s.neighbours}.",
        f"At delta = 1/users = {1 / s.users:.3g}: epsilon {_number(s.epsilon_at_delta_1_over_users)}.",
        s.attack.reading,
        f"Accountant: {_ACCOUNTANTS[s.accountant.used]} of {s.accountant.library} {s.accountant.version} "
        f"(PLD {_number(s.accountant.pld)}, RDP {_number(s.accountant.rdp)}). {s.accountant.note}".rstrip(),
    ]
    if s.steps.planned:
        how = "all users" if s.steps.sampler == "full" else f"Poisson batches of {s.steps.expected_batch_size} expected"
        lines.append(
            f"Steps: {s.steps.charged} of {s.steps.planned}, {how} (rate {s.steps.sampling_rate:.4g}), "
            f"noise multiplier {s.noise.multiplier:.4g}; noise: {s.noise.mode}, {s.noise.generator}."
        )
    lines += [f"Release {r.name}: share {r.share:.3g}, noise multiplier {r.noise_multiplier:.4g}." for r in s.releases]
    lines.append(f"Assumed public: {'; '.join(s.assumed_public)}.")
    lines.append(f"Tuning: {_tuning(s.tuning)}.")
    lines += [f"Not covered: {item}." for item in s.not_covered]
    return "\n".join(lines)


def _tuning(part: TuningPart) -> str:
    if part.kind == "accounted":
        return f"accounted: {part.mean_trials:g} trials on average ({part.distribution}), included in epsilon"
    if part.kind == "listed":
        return f"NOT accounted; {len(part.configurations)} configurations were tried on this data: " + "; ".join(
            part.configurations
        )
    if part.kind == "undeclared":
        return "NOT DECLARED: if settings were chosen by looking at results on this data, that choice is not in epsilon"
    return "on public data only" if part.kind == "public" else "none; the settings were fixed beforehand"


_ACCOUNTANTS = {"pld": "PLD", "rdp": "RDP", "gaussian": "closed form for Gaussians"}


def _number(value: float | Literal["inf"] | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
