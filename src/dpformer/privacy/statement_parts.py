"""The parts of a privacy statement, as its JSON schema has them; see `statement`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]
EpsilonValue = Annotated[float, Field(ge=0)] | Literal["inf"]


class Part(BaseModel):
    """What all parts have in common: they cannot be changed, and have no other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AccountantPart(Part):
    """Who counted. `pld` and `rdp` are both shown; "inf" where one found no bound."""

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

    planned: Annotated[int, Field(ge=1)]
    charged: Annotated[int, Field(ge=0)]
    sampler: Literal["poisson", "full"]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    expected_batch_size: Annotated[int, Field(ge=1)]
    noise_multiplier: Annotated[float, Field(ge=0)]


class ReleasePart(Part):
    """A one-shot answer: its noise, and its share of the Gaussian budget of the whole."""

    name: str
    noise_multiplier: Annotated[float, Field(ge=0)]
    share: Probability


class TuningPart(Part):
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


class AttackPart(Part):
    """An upper bound on every membership attack on what was released."""

    false_positive_rate: Probability
    true_positive_rate: Probability
    advantage: Probability
    reading: str


class LedgerPart(Part):
    """The ledger that the statement was made from."""

    run_id: str
    entries: Annotated[int, Field(ge=0)]
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
