"""How a figure was measured, in one line that stands beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """item: "test" or "validation"; users and items: how many were evaluated and ranked; left_out: users too short."""

    item: str
    users: int
    items: int
    left_out: int

    def line(self) -> str:
        """One line, for a table's foot or a model card."""
        held = {"test": "last item", "validation": "second to last item"}[self.item]
        short = f" ({self.left_out:,} users with fewer than 3 events left out)" if self.left_out else ""
        return (
            f"{self.item} item: each user's {held}, from everything before it; all {self.items:,} items ranked for all "
            f"{self.users:,} users{short}, no sampling; items of the history masked unless said otherwise, ties count "
            "against the model; 95 % intervals by bootstrap over users"
        )
