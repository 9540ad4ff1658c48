"""How a figure was measured, in one line that stands beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """item, asked, without: of `HeldOut`; users and items: how many were evaluated and ranked; left_out: users who were not."""

    item: str
    users: int
    items: int
    left_out: int
    asked: str
    without: str

    def line(self) -> str:
        """One line, for a table's foot or a model card."""
        short = f" ({self.left_out:,} users {self.without} left out)" if self.left_out else ""
        return (
            f"{self.item} item: {self.asked}; all {self.items:,} items ranked for all "
            f"{self.users:,} users{short}, no sampling; items of the history masked unless said otherwise, ties count "
            "against the model; 95 % intervals by bootstrap over users"
        )
