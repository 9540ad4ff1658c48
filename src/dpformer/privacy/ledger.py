"""What was spent, written down before it can be seen.

The ledger of a run is a hash chain (see `chain`): a header with the plan, then one line for each release or step,
synced
*before* its noisy sum exists. So after any crash the ledger says at least what was released.

A step is named by two hashes (see `fingerprint`): of the state of the noise source before it, and of all else that
determines its sum (weights, batch, settings, data). Replaying a step from a checkpoint, with both the same, is the same
release and is not charged again. With fresh noise it is charged again. The same noise for another sum is refused: the
difference of two such sums would show the data without noise.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dpformer.errors import PrivacyError
from dpformer.privacy.chain import Chain, Line, Position, canonical, create_chain, open_chain, read_chain
from dpformer.privacy.mechanisms import GaussianRelease, Mechanism
from dpformer.privacy.plan import PrivacyPlan

_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One charge: a step (by number) or a one-shot release (by name), with hashes that tell replays from redoings."""

    kind: str
    what: int | str
    noise: str
    inputs: str


@dataclass(frozen=True)
class Account:
    """What a sound ledger says: the run, its plan, and every charge in order."""

    run_id: str
    plan: PrivacyPlan
    entries: tuple[Entry, ...]
    position: Position

    @property
    def steps_charged(self) -> int:
        """How many steps have been charged, steps redone with fresh noise included."""
        return sum(entry.kind == "step" for entry in self.entries)

    @property
    def released(self) -> frozenset[str]:
        """The names of the one-shot releases that have been charged."""
        return frozenset(str(entry.what) for entry in self.entries if entry.kind == "release")

    def spent(self) -> tuple[Mechanism, ...]:
        """What has been charged, for an accountant."""
        made = tuple(release for release in self.plan.releases if release.name in self.released)
        return made + self.plan.mechanisms(self.steps_charged)[len(self.plan.releases) :]


class Ledger:
    """The open ledger of a run, locked against a second writer. Made by `create_ledger` or `open_ledger`."""

    def __init__(self, chain: Chain, run_id: str, plan: PrivacyPlan, entries: list[Entry]) -> None:
        self.run_id, self.plan = run_id, plan
        self._chain = chain
        self._entries = entries
        self._by_noise = {entry.noise: entry for entry in entries}
        self._count = {kind: sum(entry.kind == kind for entry in entries) for kind in ("step", "release")}

    def account(self) -> Account:
        """What this ledger says now."""
        return Account(self.run_id, self.plan, tuple(self._entries), self._chain.position)

    def position(self) -> Position:
        """How far this ledger has come: to be kept in a checkpoint, and given to `open_ledger` with it."""
        return self._chain.position

    def authorise_step(self, step: int, noise: str, inputs: str) -> bool:
        """Charge a step before its noisy sum is made. True if charged, False if it replays a release already charged.

        Raises `PrivacyError`, and then nothing may be released, if the budget is spent, the noise was used for another
        sum, or the line cannot be synced. `noise` and `inputs` come from `fingerprint`.
        """
        if not 1 <= step <= self.plan.steps:
            raise PrivacyError(f"step {step} is not between 1 and the plan's {self.plan.steps}")
        return self._authorise(Entry("step", step, noise, inputs))

    def authorise_release(self, name: str, noise: str, inputs: str) -> bool:
        """Charge a one-shot release of the plan before its noisy sum is made; as `authorise_step`."""
        names = [release.name for release in self.plan.releases]
        if name not in names:
            raise PrivacyError(f"release {name!r} is not in the plan, which has {names}; plan it with a share")
        return self._authorise(Entry("release", name, noise, inputs))

    def _authorise(self, entry: Entry) -> bool:
        earlier = self._by_noise.get(entry.noise)
        if earlier == entry:
            return False
        if earlier is not None:
            raise PrivacyError(
                f"the noise of {earlier.kind} {earlier.what} would be used again for a different sum ({entry.kind} "
                f"{entry.what}), and the difference of the two has no noise; continue with a fresh noise source"
            )
        if entry.kind == "step" and self._count["step"] >= self.plan.steps:
            raise PrivacyError(
                f"the budget is spent: {self._count['step']} of {self.plan.steps} steps are charged (steps redone with "
                "fresh noise count again); release the model as it is, or plan a larger budget in a new run"
            )
        if entry.kind == "release" and any((e.kind, e.what) == ("release", entry.what) for e in self._entries):
            raise PrivacyError(f"release {entry.what!r} was made before, and its budget is spent; use what it gave")
        self._chain.append(asdict(entry))
        self._entries.append(entry)
        self._by_noise[entry.noise] = entry
        self._count[entry.kind] += 1
        return True

    def close(self) -> None:
        """Let another process open the ledger."""
        self._chain.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fingerprint(*parts: bytes | str | Mapping[str, Any]) -> str:
    """A SHA-256 over parts (bytes, text, JSON-ready mappings), to name a noise state or what else determines a sum.

    Each part goes in with its length, so that no two lists of parts run into one another. A noise state has 192 unknown
    bits or more, so its hash in the ledger tells nothing about it. Anything private must be hashed together with one: a
    bare hash of the data would let anybody confirm a guess of it, and ledgers are released.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode() if isinstance(part, str) else canonical(part)
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def create_ledger(folder: Path | str, plan: PrivacyPlan) -> Ledger:
    """Begin the ledger of a new run. A folder that already has one is refused: its spending would be forgotten."""
    if not plan.private:
        raise PrivacyError("a run with epsilon inf spends without bound; it has no budget to keep, and needs no ledger")
    run_id = secrets.token_hex(16)
    chain = create_chain(Path(folder), {"ledger": _VERSION, "run_id": run_id, "plan": plan_to_json(plan)})
    return Ledger(chain, run_id, plan, [])


def open_ledger(folder: Path | str, known: Position | None = None, run_id: str | None = None) -> Ledger:
    """Continue a ledger after checking all of it; `known` and `run_id` are what the run's checkpoint remembers."""
    chain, lines = open_chain(Path(folder), known)
    try:
        found, plan, entries = _parse(Path(folder), lines, run_id)
    except BaseException:
        chain.close()
        raise
    return Ledger(chain, found, plan, entries)


def read_ledger(folder: Path | str, known: Position | None = None, run_id: str | None = None) -> Account:
    """Check a ledger and tell what it says, without the right to write it."""
    lines = read_chain(Path(folder), known)
    found, plan, entries = _parse(Path(folder), lines, run_id)
    return Account(found, plan, tuple(entries), Position(len(entries), lines[-1]["hash"]))


def _parse(folder: Path, lines: list[Line], run_id: str | None) -> tuple[str, PrivacyPlan, list[Entry]]:
    header = lines[0]
    if header.get("ledger") != _VERSION:
        raise PrivacyError(
            f"the ledger in {folder} is of format {header.get('ledger')!r}, not {_VERSION}; update dpformer"
        )
    try:
        found, plan = str(header["run_id"]), plan_from_json(header["plan"])
        entries = [Entry(line["kind"], line["what"], line["noise"], line["inputs"]) for line in lines[1:]]
    except (KeyError, TypeError, AttributeError) as problem:
        raise PrivacyError(
            f"the ledger in {folder} lacks {problem}: dpformer did not write it; do not trust it"
        ) from None
    if run_id is not None and found != run_id:
        raise PrivacyError(f"the ledger in {folder} belongs to run {found}, not to {run_id}: it was copied")
    return found, plan, entries


def plan_to_json(plan: PrivacyPlan) -> dict[str, Any]:
    """A plan as JSON; an infinite epsilon, for which JSON has no number, becomes "inf"."""
    return {**asdict(plan), "epsilon": plan.epsilon if plan.private else "inf"}


def plan_from_json(fields: Mapping[str, Any]) -> PrivacyPlan:
    """The plan that `plan_to_json` wrote, checked as when it was made, its cost included."""
    try:
        releases = tuple(GaussianRelease(**release) for release in fields["releases"])
        return PrivacyPlan(**{**fields, "epsilon": float(fields["epsilon"]), "releases": releases})
    except (TypeError, KeyError, ValueError) as problem:
        raise PrivacyError(f"a privacy plan cannot be read ({problem}); it is of another version") from problem
