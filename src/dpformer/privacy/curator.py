"""The Curator: the only object that applies queries to people's data, and the only one that adds noise to sums.

An answer leaves in this order: the sum is complete; the ledger is charged and synced; noise is drawn and added; the secret is
ratcheted. So after any crash the ledger has at least what was released, the same query at the same place gets the same answer
again (a replay, charged once), and another query at that place is refused.

The sum Q is whole and moves by at most D grid steps between neighbours; the noise K has standard deviation s >= multiplier D
(see `noise`). What leaves is grid (Q + K), exact in float64, and nothing else.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sized
from typing import Any, Generic, TypeVar

import numpy as np

from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import Charge
from dpformer.privacy.keys import Keys, Uncopied
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.noise import FARTHEST, check_std, poisson_draw, rounded_gaussian
from dpformer.privacy.plan import GRADIENTS, PrivacyPlan
from dpformer.privacy.query import Answer, Query, Sample, grid_step
from dpformer.privacy.selection import Counts, Selection, named

P = TypeVar("P", bound=Sized)
Noise = Callable[[bytes, tuple[int, ...], float], np.ndarray]

# Without privacy nothing is clipped or noised: a fine grid keeps small gradients.
_GRID_WITHOUT_NOISE = 2.0**-34


class Curator(Uncopied, Generic[P]):
    """Holds people's data and the noise; answers the queries of one plan, in the plan's order.

    people: one entry for each person, with a length. ledger: None only for a plan with epsilon inf, whose answers are exact.
    noise, draw: the makers of noise and samples; others are for tests that plant a defect.
    """

    def __init__(
        self,
        people: P,
        plan: PrivacyPlan,
        ledger: Ledger | None,
        keys: Keys,
        *,
        noise: Noise = rounded_gaussian,
        draw: Callable[[bytes, int, float], np.ndarray] = poisson_draw,
    ) -> None:
        if plan.private != (ledger is not None):
            raise PrivacyError("a private plan needs a ledger, and a plan with epsilon inf has none")
        if ledger is not None and ledger.plan != plan:
            raise PrivacyError("the ledger is of another plan; use the plan that it was made with")
        self.plan, self.ledger, self.keys = plan, ledger, keys
        self._people = people
        self._noise, self._draw = noise, draw
        # Called with each private answer, its place and the plan; see `replay`.
        self.keep: Callable[[int, Answer, PrivacyPlan], None] | None = None

    def upcoming(self, query: Query[P]) -> tuple[Sample, float]:
        """Who the next answer is about, and its grid, for a query whose sum is computed before it is asked.

        It is the same until that answer is made, and as secret as the keys.
        """
        planned, grid, _ = self._terms(query)
        return self._sample(planned), grid

    def _sample(self, planned: Charge) -> Sample:
        return Sample(self._draw(self.keys.sample(), len(self._people), planned.rate), self.keys.dropout())

    def _terms(self, query: Query[P]) -> tuple[Charge, float, float]:
        """What the plan has for this query, its grid, and the standard deviation of its noise in grid steps."""
        planned = self.plan.planned(self.keys.place)
        if query.name != planned.name:
            raise PrivacyError(f"query {query.name!r} is not the next of the plan, {planned.name!r}; plan it first")
        choice = isinstance(query, Selection)
        if choice and self.plan.private and (self.keys.place or not self.plan.threshold_delta):
            raise PrivacyError(f"the plan has no threshold for {query.name!r}: it has one for its first answer at most")
        # The grid is public, and the number of cells of a selection is not.
        numbers = 1 if choice else query.numbers
        fine = not self.plan.private and planned.name == GRADIENTS
        grid = _GRID_WITHOUT_NOISE if fine else grid_step(query.bound, numbers)
        # Rounded up, so that rounding cannot lower the noise.
        std = math.nextafter(planned.noise_multiplier * query.sensitivity(grid), math.inf)
        if self.plan.private:
            check_std(std)
        return planned, grid, std

    def ask(self, query: Query[P]) -> Answer:
        """The answer to the next query of the plan; a `PrivacyError`, and nothing charged, for any other."""
        planned, grid, std = self._terms(query)
        sample = self._sample(planned)
        # A selection by its own class: its threshold holds only for vectors that were checked.
        add_up = functools.partial(Selection.sum, query) if isinstance(query, Selection) else query.sum
        sums = add_up(self._people, sample, grid)
        _check(query, sums)
        if not self.plan.private:
            self.keys.ratchet()
            return Answer(query.name, {name: value * grid for name, value in sums.items()}, 0.0, grid)
        assert self.ledger is not None
        _check_exact(query.name, sums, std)
        digest = _digest(sums, grid, std)
        self.ledger.charge(self.keys.place, query.name, self.keys.tag(query.name, digest))
        noisy: Mapping[str, np.ndarray] = {
            name: value + self._noise(self.keys.noise(name, digest), value.shape, std) for name, value in sums.items()
        }
        place = self.keys.place
        self.keys.ratchet()
        labels: tuple[Any, ...] = ()
        if isinstance(query, Selection):
            counts = Counts(sums[query.name], noisy[query.name], std, grid)
            noisy, labels = named(query, counts, self.plan.threshold_delta)
        answer = Answer(query.name, {name: value * grid for name, value in noisy.items()}, std * grid, grid, labels)
        if self.keep is not None:
            self.keep(place, answer, self.plan)
        return answer

    def replace_events(self, function: Callable[[P], P]) -> None:
        """Continue with other events of the same people, for example without items that were not selected.

        The caller promises that person i keeps place i, and that the person's new events are a function of the person's old
        events and of answers alone: else one person moves the sums by more than the sensitivity. The Curator can check only
        that the number of people stays: it does not know what an event is.
        """
        people = function(self._people)
        if len(people) != len(self._people):
            raise PrivacyError(f"there are {len(people)} people, not {len(self._people)}; each must keep their place")
        self._people = people


def _check(query: Query[P], sums: Mapping[str, np.ndarray]) -> None:
    """Refuse, before anything is charged, sums that are not whole numbers, or more or fewer than the query has."""
    if any(value.dtype != np.int64 for value in sums.values()):
        raise PrivacyError(f"the sum of {query.name!r} is not of whole numbers; nothing was released")
    if sum(value.size for value in sums.values()) != query.numbers:
        raise PrivacyError(f"the sum of {query.name!r} has another size than its query; nothing was released")


def _check_exact(name: str, sums: Mapping[str, np.ndarray], std: float) -> None:
    """Refuse, before anything is charged, sums whose answer may have numbers that are not exact in float64."""
    most = 2**53 - math.ceil(FARTHEST * std)
    # Two comparisons: |-2^63| is not a number of 64 bits.
    if any(value.size and not -most < int(value.min()) <= int(value.max()) < most for value in sums.values()):
        raise PrivacyError(f"the sum of {name!r} is too large: its answer is not exact in float64; nothing was charged")


def _digest(sums: Mapping[str, np.ndarray], grid: float, std: float) -> bytes:
    """SHA-256 over grid, noise and all arrays with their names and shapes, in the order of the names.

    With the noise in it, a query with the same sum and another sensitivity is another query: the same draw at two scales would
    reveal the sum.
    """
    digest = hashlib.sha256(f"{grid.hex()} {std.hex()}".encode())
    for name in sorted(sums):
        head = f"{name} {sums[name].shape}".encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(np.ascontiguousarray(sums[name]).reshape(-1).data)
    return digest.digest()
