"""The account of people: what several runs on the same people spend together, under a cap.

An account is a folder with a hash chain (see `chain`): a header with the cap, then one line for each run, synced *before* the run
asks anything. A line holds the run's whole plan, carried out or not, so a run that fails stays charged. The run's ledger begins
with a `Receipt`, the hash of that line, which cannot exist before the line does: so the order can be checked afterwards.

What the figures mean. Neighbours: one person's events are replaced by none *in all runs*. All answers of all runs are composed as
one mechanism, and `together` is the smallest epsilon for which it is (epsilon, delta)-DP at the cap's delta. So delta is of the
whole account: the deltas of single runs do not add up, except for parts that thresholds took (private catalogues), which do, and
are taken from the cap's delta first. Gaussians compose to one Gaussian exactly, also if a run was planned after looking at what
earlier ones released (Smith and Thakurta 2022). For Poisson steps that holds if plans do not depend on earlier releases.

Detected: all that `chain` detects; and an old copy of the account, by the receipts of runs that the caller knows (`charge`,
`read`). Not detected: an old copy where no later run's folder is at hand, runs on the same people that were charged to no account
or to another one, and a clock that is ahead (a cap per year trusts the clock; one that is behind has no effect).
"""

import functools
import json
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.files import readable
from dpformer.privacy.accounting import Charge, check_delta, check_epsilon, epsilon, scaled
from dpformer.privacy.calibration import smallest_noise
from dpformer.privacy.chain import CHAIN, Line, create_chain, open_chain, read_chain
from dpformer.privacy.plan import PrivacyPlan
from dpformer.privacy.wording import round_up

_VERSION = 1
# How long a writer waits for another one. A charge takes seconds at most.
PATIENCE = 120.0


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Cap:
    """What all runs together may spend. per: "year", each calendar year (UTC) by itself; "" for all time."""

    epsilon: float
    delta: float = 1e-5
    per: str = ""

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        if math.isinf(self.epsilon):
            raise PrivacyError("a cap of epsilon inf is no cap; give a finite epsilon")
        if self.per not in ("", "year"):
            raise PrivacyError(f"a cap is per year, or for all time, not per {self.per!r}")


@dataclass(frozen=True)
class Receipt:
    """A line of an account: the account's id, the number of the line, and its hash."""

    account: str
    entries: int
    hash: str

    def __post_init__(self) -> None:
        if (type(self.account), type(self.entries), type(self.hash)) != (str, int, str) or self.entries < 1:
            raise TypeError("a receipt with an account, a number above 0 and a hash")


@dataclass(frozen=True)
class RunCharge:
    """What one run may spend, whether or not it does. users: in its data, or declared; who they are is not recorded."""

    run_id: str
    name: str
    time: str
    users: int
    epsilon: float
    delta: float
    charges: tuple[Charge, ...]
    threshold_delta: float = 0.0

    @classmethod
    def of(cls, run_id: str, name: str, plan: PrivacyPlan, time: str = "") -> "RunCharge":
        """The charge of a plan."""
        if not plan.private:
            raise PrivacyError("a run with epsilon inf spends without bound, and no account has room for it")
        return cls(run_id, name, time, plan.users, plan.epsilon, plan.delta, plan.charges(), plan.threshold_delta)


@dataclass(frozen=True)
class Spending:
    """The content of a sound account: its cap, and all charges in order with the hashes of their lines."""

    id: str
    cap: Cap
    runs: tuple[RunCharge, ...]
    hashes: tuple[str, ...]

    def counted(self, time: str) -> tuple[RunCharge, ...]:
        """The charges that count against the cap at a time: all, or those of its year."""
        return tuple(run for run in self.runs if not self.cap.per or run.time[:4] == time[:4])

    def check(self, receipt: Receipt, where: str) -> None:
        """Refuse an account that lacks a line which a run has a receipt for. Receipts of other accounts prove nothing."""
        if receipt.account != self.id:
            return
        if receipt.entries > len(self.runs) or self.hashes[receipt.entries - 1] != receipt.hash:
            raise PrivacyError(
                f"the account has {len(self.runs)} charges, and not number {receipt.entries}, which {where} has a receipt for: "
                "it is an old copy or was changed; put back the newest copy"
            )

    def upto(self, receipt: Receipt, where: str = "the run") -> "Spending":
        """The account just after the charge with this receipt, which must be in it."""
        if receipt.account != self.id:
            raise PrivacyError(
                f"{where} was charged to account {receipt.account[:8]}, and this is {self.id[:8]}; give the account that the run "
                "was charged to"
            )
        self.check(receipt, where)
        return replace(self, runs=self.runs[: receipt.entries], hashes=self.hashes[: receipt.entries])


class PeopleAccount:
    """The account in a folder. Any number of processes may use it: each waits for its turn."""

    def __init__(self, folder: Path | str, clock: Callable[[], str] = now, patience: float = PATIENCE) -> None:
        self.folder, self._clock, self._patience = Path(folder), clock, patience

    @classmethod
    def create(cls, folder: Path | str, cap: Cap) -> "PeopleAccount":
        """A new, empty account. An existing one is refused: its charges would be forgotten."""
        if Path(folder).exists():
            raise PrivacyError(f"{folder}: exists already; an account is made once, choose another name")
        header = {"account": _VERSION, "id": secrets.token_hex(16), "cap": asdict(cap)}
        create_chain(Path(folder), header).close()
        return cls(folder)

    def read(self, receipt: Receipt | None = None, where: str = "the run") -> Spending:
        """Check the whole account and return its content. receipt: a charge that must be in it, and of whom."""
        self._must_exist()
        return _parse(self.folder, [] if receipt is None else [(where, receipt)], read_chain(self.folder))

    def charge(self, run: RunCharge, receipts: Iterable[tuple[str, Receipt]] = (), over: bool = False) -> Receipt:
        """Charge a run before it asks anything; returns after the line is synced. A run is charged once.

        receipts: of other runs, with their names; an account that lacks one of them is refused as an old copy.
        over: charge it above the cap too, since it has been spent already.
        """
        self._must_exist()
        parse = functools.partial(_parse, self.folder, receipts)
        chain, spending = open_chain(self.folder, parse, patience=self._patience)
        try:
            for number, charged in enumerate(spending.runs):
                if charged.run_id == run.run_id:
                    if replace(charged, time=run.time, name=run.name) != run:
                        raise PrivacyError(f"{self.folder}: run {run.run_id} was charged with another plan")
                    return Receipt(spending.id, number + 1, spending.hashes[number])
            # Never before the last charge: a clock that is set back cannot bring back a year.
            run = replace(run, time=max([self._clock(), *(one.time for one in spending.runs[-1:])]))
            if not over:
                refuse_excess(spending, run)
            chain.append(asdict(run))
            return Receipt(spending.id, chain.position.entries, chain.position.hash)
        finally:
            chain.close()

    def _must_exist(self) -> None:
        if not (self.folder / CHAIN).exists():
            cure = f"make one with: dpformer account new {self.folder} --epsilon 8"
            raise PrivacyError(
                f"{self.folder}: is not an account of people; {cure}, or put back the one that was there"
            )


def composed(runs: Sequence[RunCharge]) -> tuple[tuple[Charge, ...], float]:
    """All charges of these runs, and the part of delta that their thresholds took."""
    return tuple(one for run in runs for one in run.charges), math.fsum(run.threshold_delta for run in runs)


def together(runs: Sequence[RunCharge], delta: float) -> float:
    """The epsilon of all these runs composed, at `delta`; infinite if thresholds took all of delta."""
    charges, threshold = composed(runs)
    return epsilon(charges, delta, threshold).epsilon if threshold < delta else math.inf


def refuse_excess(spending: Spending, run: RunCharge) -> None:
    """Raise unless the run keeps within the cap; the message says what is left and what would fit."""
    cap, counted = spending.cap, spending.counted(run.time)
    if cap.delta * run.users >= 1:
        raise PrivacyError(
            f"the account of people has delta {cap.delta:g}, not below 1/users = {1 / run.users:.3g} of this run: it may "
            "publish a whole user. Make an account with a smaller delta; nothing was asked or charged"
        )
    total = together((*counted, run), cap.delta)
    if total <= cap.epsilon * (1 + 1e-9):
        return
    room, spent = largest_epsilon(counted, cap, run), round_up(together(counted, cap.delta), 4)
    cure = f"epsilon {room:g} would fit" if room else "nothing more fits"
    later = ", or wait for the next year" if cap.per else ""
    raise PrivacyError(
        f"the account of people has a cap of epsilon {cap.epsilon:g} at delta {cap.delta:g}{' per year' if cap.per else ''}; its "
        f"{len(counted)} runs spend {spent:.4g}, and with this run's {run.epsilon:g} they would "
        f"spend {round_up(total, 4):.4g}. {cure}{later}. Nothing was asked or charged"
    )


def largest_epsilon(before: Sequence[RunCharge], cap: Cap, shape: RunCharge, times: int = 1) -> float:
    """The epsilon, at its own delta, of the largest run that fits `times` times beside those before; 0 if none does.

    Its answers are those of `shape`, all with noise multiplied by one factor. Rounded down to three digits.
    """
    repeated = tuple(replace(charge, times=charge.times * times) for charge in shape.charges)

    def spent(factor: float) -> float:
        all_of_them = replace(shape, charges=scaled(repeated, factor), threshold_delta=times * shape.threshold_delta)
        return together((*before, all_of_them), cap.delta)

    try:
        factor = smallest_noise(spent, cap.epsilon, math.sqrt(times))
    except PrivacyError:
        return 0.0
    largest = together([replace(shape, charges=scaled(shape.charges, factor))], shape.delta)
    unit = 10.0 ** (math.floor(math.log10(largest)) - 2)
    return round(math.floor(largest / unit * (1 + 1e-9)) * unit, 12)


def receipts_beside(folder: Path) -> list[tuple[str, Receipt]]:
    """The receipts of the runs beside a run folder, from the first lines of their ledgers."""
    receipts = []
    for ledger in sorted(folder.parent.glob(f"*/{CHAIN}")):
        try:
            with readable(ledger), ledger.open("rb") as file:
                header = json.loads(file.readline(1 << 20))
            receipts.append((str(ledger.parent), Receipt(**header["receipt"])))
        except (DPFormerError, ValueError, KeyError, TypeError, RecursionError):
            continue  # not a ledger, or of a run without an account
    return receipts


def _parse(folder: Path, receipts: Iterable[tuple[str, Receipt]], lines: list[Line]) -> Spending:
    header, runs = lines[0], lines[1:]
    if header.get("account") != _VERSION:
        raise PrivacyError(f"{folder}: is not an account of people of version {_VERSION}; update dpformer")
    try:
        spending = Spending(
            header["id"],
            Cap(**header["cap"]),
            tuple(_run(**line) for line in runs),
            tuple(line["hash"] for line in runs),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise PrivacyError(f"{folder}: lacks {problem}: dpformer did not write it; do not trust it") from None
    for where, receipt in receipts:
        spending.check(receipt, where)
    return spending


def _run(n: int, previous: str, hash: str, charges: list[Line], **fields: Any) -> RunCharge:
    return RunCharge(charges=tuple(Charge(**charge) for charge in charges), **fields)
