"""How a figure was measured, in one line that stands beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """item, asked, without: of `HeldOut`; users and items: how many were evaluated and ranked; left_out: users who cannot be.

    drawn_from: the users that the evaluated ones were drawn from.
    """

    item: str
    users: int
    items: int
    left_out: int
    asked: str
    without: str
    drawn_from: int

    def line(self) -> str:
        """One line, for a table's foot or a model card."""
        short = f" ({self.left_out:,} users {self.without} left out)" if self.left_out else ""
        who = f"all {self.users:,} users{short}, no sampling"
        if self.users < self.drawn_from:
            who = f"{self.users:,} users, drawn uniformly from {self.drawn_from:,}{short}"
        return (
            f"{self.item} item: {self.asked}; all {self.items:,} items ranked for {who}; items of the history masked unless said "
            "otherwise, ties count against the model; 95 % intervals by bootstrap over users"
        )
