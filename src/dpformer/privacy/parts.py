"""The parts of a privacy statement as data."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dpformer.privacy.account import Receipt, Spending, together

Probability = Annotated[float, Field(ge=0, le=1)]
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
    delta: Annotated[float, Field(gt=0, lt=1)]
    cap: Annotated[float, Field(gt=0)]
    period: str = ""
    epsilon_in_period: EpsilonValue

    @classmethod
    def of(cls, spending: Spending, receipt: Receipt) -> "AccountPart":
        """The part for the run with this receipt."""
        spending, cap = spending.upto(receipt), spending.cap
        time = spending.runs[-1].time
        return cls(
            id=spending.id,
            runs=receipt.entries,
            hash=receipt.hash,
            epsilon=together(spending.runs, cap.delta),
            delta=cap.delta,
            cap=cap.epsilon,
            period=time[:4] if cap.per else "",
            epsilon_in_period=together(spending.counted(time), cap.delta),
        )


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
