"""How a figure was measured, in one line that stands beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """item: "test" or "validation"; users and items: how many were evaluated and ranked; left_out: users too short.
    drawn_from: how many users the evaluated ones were drawn from, if not all of them.
    """

    item: str
    users: int
    items: int
    left_out: int
    drawn_from: int | None = None

    def line(self) -> str:
        """One line, for a table's foot or a model card."""
        held = {"test": "last item", "validation": "second to last item"}[self.item]
        short = f" ({self.left_out:,} users with fewer than 3 events left out)" if self.left_out else ""
        who = f"all {self.users:,} users{short}, no sampling"
        if self.drawn_from is not None and self.drawn_from > self.users:
            who = f"{self.users:,} users, drawn uniformly from {self.drawn_from:,}{short}"
        return (
            f"{self.item} item: each user's {held}, from everything before it; all {self.items:,} items ranked for {who}; "
            "items of the history masked unless said otherwise, ties count "
            "against the model; 95 % intervals by bootstrap over users"
        )
