"""Keep users and items with enough events. Works on id codes; `kept` is one boolean an event."""

from enum import Enum

import numpy as np


class Filter(str, Enum):
    """How `min_events` is applied.

    single-pass: counts on the log as it is; an event stays if both its user and its item reach the minimum there
    (Kang & McAuley, 2018: the paper's data). Afterwards some users and items have fewer events than that.
    iterative: again until every user and item that is left has the minimum (the k-core).
    """

    SINGLE_PASS = "single-pass"
    ITERATIVE = "iterative"


def keep_frequent(users: np.ndarray, items: np.ndarray, minimum: int, rule: Filter) -> np.ndarray:
    """Which events stay. users, items: codes, int [events]; returns bool [events]."""
    kept = np.ones(len(users), dtype=bool)
    while True:
        frequent_users = np.bincount(users[kept], minlength=int(users.max(initial=0)) + 1) >= minimum
        frequent_items = np.bincount(items[kept], minlength=int(items.max(initial=0)) + 1) >= minimum
        still = kept & frequent_users[users] & frequent_items[items]
        if rule is Filter.SINGLE_PASS or still.sum() == kept.sum():
            return still
        kept = still
