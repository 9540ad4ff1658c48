"""The ledger of a run: each answer is charged before it exists.

The ledger is a hash chain (see `chain`): a header with the plan (and the receipt of an account of people), then one line for
each answer, synced *before* its noisy sum exists. So after any crash the ledger has at least what was released. A line holds the
name of the query and a tag: a keyed hash of the sum before noise (see `keys`). Asking again at the same place is a replay: with
the same tag it is the same answer and is not charged again, with another tag it is refused.
"""

import functools
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from dpformer.errors import PrivacyError
from dpformer.privacy.account import Receipt
from dpformer.privacy.accounting import Charge
from dpformer.privacy.chain import Chain, Line, Position, create_chain, open_chain, read_chain
from dpformer.privacy.keys import Uncopied
from dpformer.privacy.plan import GRADIENTS, PrivacyPlan, plan_from_json, plan_to_json

_VERSION = 2


@dataclass(frozen=True)
class Entry:
    """One charged answer: the name of its query, and the tag that distinguishes a replay from another sum."""

    name: str
    tag: str


@dataclass(frozen=True)
class Account:
    """The content of a sound ledger: the run, its plan, and all entries in order."""

    run_id: str
    plan: PrivacyPlan
    entries: tuple[Entry, ...]
    position: Position
    receipt: Receipt | None = None

    @property
    def steps_charged(self) -> int:
        """How many steps have been charged."""
        return sum(entry.name == GRADIENTS for entry in self.entries)

    @property
    def released(self) -> frozenset[str]:
        """The names of the charged answers that are not steps."""
        return frozenset(entry.name for entry in self.entries if entry.name != GRADIENTS)

    def spent(self) -> tuple[Charge, ...]:
        """What has been charged, for an accountant."""
        made = tuple(release for release in self.plan.releases if release.name in self.released)
        return made + self.plan.charges(self.steps_charged)[len(self.plan.releases) :]


class Ledger(Uncopied):
    """The open ledger of a run, locked against a second writer. Made by `create_ledger` or `open_ledger`."""

    def __init__(
        self, chain: Chain, run_id: str, plan: PrivacyPlan, entries: list[Entry], receipt: Receipt | None = None
    ) -> None:
        self.run_id, self.plan, self.receipt = run_id, plan, receipt
        self._chain, self._entries = chain, entries

    def account(self) -> Account:
        """The content of this ledger now."""
        return Account(self.run_id, self.plan, tuple(self._entries), self._chain.position, self.receipt)

    def position(self) -> Position:
        """How far this ledger has come: a checkpoint keeps it, for `open_ledger`."""
        return self._chain.position

    def charge(self, place: int, name: str, tag: str) -> bool:
        """Charge the answer number `place` (0 is the first) before its noise exists. False for a replay, which is free.

        A `PrivacyError` means that nothing may be released.
        """
        if self.plan.planned(place).name != name:
            raise PrivacyError(f"answer {place} of the plan is {self.plan.planned(place).name!r}, not {name!r}")
        entry = Entry(name, tag)
        if place < len(self._entries):
            if self._entries[place] == entry:
                return False
            raise PrivacyError(
                f"answer {place} ({name}) was charged for another sum than the one made now; a second answer is not paid for. "
                "Resume with the same data, dpformer, torch, number of threads and kind of processor, or fit again elsewhere"
            )
        if place > len(self._entries):
            raise PrivacyError(f"answer {place} ({name}) is asked before {len(self._entries)}; ask in the plan's order")
        self._chain.append(asdict(entry))
        self._entries.append(entry)
        return True

    def close(self) -> None:
        """Let another process open the ledger."""
        self._chain.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_ledger(
    folder: Path | str, plan: PrivacyPlan, run_id: str | None = None, receipt: Receipt | None = None
) -> Ledger:
    """Start the ledger of a new run. A folder that already has one is refused: its spending would be forgotten.

    run_id, receipt: of a run that was charged to an account of people.
    """
    if not plan.private:
        raise PrivacyError("a run with epsilon inf spends without bound: it has no budget, and needs no ledger")
    run_id = run_id or secrets.token_hex(16)
    header = {"ledger": _VERSION, "run_id": run_id, "plan": plan_to_json(plan)}
    chain = create_chain(Path(folder), header | ({"receipt": asdict(receipt)} if receipt else {}))
    return Ledger(chain, run_id, plan, [], receipt)


def open_ledger(folder: Path | str, expected: Position | None = None, run_id: str | None = None) -> Ledger:
    """Continue a ledger after checking all of it. expected, run_id: from the run's checkpoint."""
    chain, account = open_chain(Path(folder), functools.partial(_parse, folder, run_id), expected)
    return Ledger(chain, account.run_id, account.plan, list(account.entries), account.receipt)


def read_ledger(folder: Path | str, expected: Position | None = None, run_id: str | None = None) -> Account:
    """Check a whole ledger and return its content, without the right to write it."""
    return _parse(folder, run_id, read_chain(Path(folder), expected))


def _parse(folder: Path | str, run_id: str | None, lines: list[Line]) -> Account:
    header, where = lines[0], f"the ledger in {folder}"
    if header.get("ledger") != _VERSION:
        cure = "its noise leaks, so fit again" if header.get("ledger") == 1 else "update dpformer"
        raise PrivacyError(f"{where} is of format {header.get('ledger')!r}, not {_VERSION}; {cure}")
    try:
        named, plan = str(header["run_id"]), plan_from_json(header["plan"])
        entries = tuple(Entry(line["name"], line["tag"]) for line in lines[1:])
        receipt = Receipt(**header["receipt"]) if "receipt" in header else None
    except (KeyError, TypeError, AttributeError) as problem:
        raise PrivacyError(f"{where} lacks {problem}: dpformer did not write it; do not trust it") from None
    for place, entry in enumerate(entries):
        if plan.planned(place).name != entry.name:
            raise PrivacyError(f"{where} charges {entry.name!r} at place {place}, which the plan does not have")
    if run_id is not None and named != run_id:
        raise PrivacyError(f"{where} belongs to run {named}, not to {run_id}: it was copied")
    return Account(named, plan, entries, Position(len(entries), lines[-1]["hash"]), receipt)
