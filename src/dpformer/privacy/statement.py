"""The privacy statement as data: what is promised, on what assumptions, and what is not.

`privacy.json` follows a JSON schema (`json_schema`, committed as docs/privacy.schema.json). `build` makes it; its words are in
`wording`.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dpformer import notebook
from dpformer.errors import PrivacyError
from dpformer.privacy import wording

Probability = Annotated[float, Field(ge=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Multiplier = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
# JSON has no number for infinity.
EpsilonValue = Annotated[
    Annotated[float, Field(ge=0)] | Literal["inf"], BeforeValidator(lambda value: "inf" if value == math.inf else value)
]


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


class AccountPart(Part):
    """The account of people that the run was charged to, with all charges up to this run's own; later runs add to it.

    runs: how many, this one included. hash: of this run's line. epsilon: of all of them together, at the cap's delta.
    period: the calendar year (UTC) for which the cap holds, and epsilon_in_period of the runs in it; without a period, all runs.
    """

    id: str
    runs: AtLeastOne
    hash: str
    epsilon: EpsilonValue
    delta: Delta
    cap: Annotated[float, Field(gt=0)]
    period: str = ""
    epsilon_in_period: EpsilonValue


class AlonePart(Part):
    """The pair of a run alone, where the statement's pair is of earlier runs too."""

    epsilon: EpsilonValue
    delta: Delta


class DataPart(Part):
    """What was decided by the data.

    catalogue: "public", a list given from outside; "log", the items that occur in the log, *assumed* public; "private", items
    chosen by noisy counts above a threshold; "none", a model of the caller's. threshold_delta: the part of delta that this
    threshold takes.
    outside_guarantee: what was done to the data that the guarantee does not cover. trained_on: which events were used.
    """

    catalogue: Literal["public", "log", "private", "none"]
    threshold_delta: Annotated[float, Field(ge=0, lt=1)] = 0.0
    outside_guarantee: tuple[str, ...] = ()
    trained_on: str = "all events"


class PrivacyStatement(Part):
    """All that is needed to judge the guarantee of a published model. users_declared: `users` was given, and not counted.

    epsilon, delta: what counts for the model. alone: of this run, where the model also uses what earlier runs of the account
    released; then epsilon, delta, epsilon_at_delta_1_over_users, accountant and attack are of all of them together.
    """

    format: Literal[2] = 2
    private: bool
    epsilon: EpsilonValue
    delta: Delta
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
    alone: AlonePart | None = None
    versions: dict[str, str]

    @model_validator(mode="after")
    def _consistent(self) -> "PrivacyStatement":
        if self.private == ((self.alone or self).epsilon == "inf"):
            raise ValueError("private must be false exactly when epsilon is inf")
        counted = self.account and (self.account.epsilon, self.account.delta)
        if self.alone is not None and (self.epsilon, self.delta) != counted:
            raise ValueError("epsilon and delta must be those of the account, whose earlier runs the model uses")
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

    __str__ = text

    def __repr__(self) -> str:
        return f"<PrivacyStatement: {self.text().splitlines()[0]}>"

    def _repr_html_(self) -> str:
        title, *lines = self.text().splitlines()
        named = (line.partition(": ") for line in lines)
        rows = [(name, text) if text and len(name) < 40 else ("", name + colon + text) for name, colon, text in named]
        return notebook.table(title, (), rows)


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
