"""How often items occur: p_i, the share of users whose sequence holds item i, in one of three explicit ways.

* `noisy_histogram` (default): a Gaussian release paid from the same budget.
* `public_frequencies`: numbers that you know from elsewhere.
* `assume_public`: exact counts of the private data, declared public. The paper's way; it is *outside* the guarantee and
  the statement says so.

Guarantee of the histogram: a user's distinct items make a 0/1 vector, which is divided by its L2 norm and scaled by
1 - 1e-6; so adding or removing one user changes the sum by a norm below 1, and Gaussian noise of standard deviation
sigma on each of the M items makes the release one Gaussian mechanism of multiplier sigma. All that follows is
post-processing.

Sequences are flat: `items` (ids 1..M, 0 is padding) and `offsets` (users + 1).
"""

from dataclasses import dataclass

import numpy as np

from dpformer.errors import PrivacyError
from dpformer.privacy.mechanisms import SCALE, GaussianRelease
from dpformer.privacy.noise import NoiseSource


@dataclass(frozen=True)
class ItemFrequencies:
    """`probability[i]` in (0, 1] for item i; entry 0, padding, is 1. `source` says how it came about.

    `histogram` is the released noisy sum for the source "histogram" (entry 0 is 0), else None.
    """

    probability: np.ndarray
    source: str
    floor: float
    histogram: np.ndarray | None = None


def user_histogram(items: np.ndarray, offsets: np.ndarray, item_count: int, last: int = 2000) -> np.ndarray:
    """Sum over users of the unit vector of their distinct items among the `last` ones. Exact: *not* to be released.

    Each user's vector has norm 1 - 1e-6 (0 for a user without items), so the sensitivity is below 1.
    """
    user, item = _distinct(items, offsets, item_count, last)
    count = np.bincount(user, minlength=len(offsets) - 1)
    return np.bincount(item, weights=SCALE / np.sqrt(count[user]), minlength=item_count + 1)


def noisy_histogram(
    items: np.ndarray,
    offsets: np.ndarray,
    item_count: int,
    release: GaussianRelease,
    noise: NoiseSource,
    users: int,
    floor: float | None = None,
    last: int = 2000,
) -> ItemFrequencies:
    """Release the histogram with the noise of `release` and read document frequencies from it.

    If every user had k distinct items, the sum would be h_i = n_i / sqrt(k) and its total H = N sqrt(k), so
    p_i = n_i / N = h_i H / N^2: that is the estimate, from released values alone. With users of different lengths it
    understates what long sequences hold; the order of the items is unaffected.

    `floor` bounds p_i from below, in the scale of p; by default it is one standard deviation of the noise, below which
    a count cannot be told from none, and never less than 1 / users.
    """
    if release.noise_multiplier == 0:
        raise PrivacyError(f"release {release.name!r} has no noise; use assume_public to declare frequencies public")
    exact = user_histogram(items, offsets, item_count, last)
    noisy = exact + release.noise_multiplier * noise.normal(item_count + 1).astype(np.float64)
    noisy[0] = 0.0
    total = max(float(noisy.sum()), float(users))  # at least one item a user: keeps pure noise from a negative scale
    scale = total / users**2
    if floor is None:
        floor = min(max(release.noise_multiplier * scale, 1 / users), 1.0)
    return _floored(noisy * scale, "histogram", floor, noisy)


def public_frequencies(probability: np.ndarray, floor: float) -> ItemFrequencies:
    """Frequencies known from elsewhere; entry i for item i, entry 0 is ignored. They must not come from the log."""
    probability = np.asarray(probability, dtype=np.float64)
    if not (np.isfinite(probability).all() and (probability >= 0).all() and (probability <= 1).all()):
        raise PrivacyError("public frequencies must be finite and between 0 and 1: the share of users with the item")
    return _floored(probability, "public", floor, None)


def assume_public(items: np.ndarray, offsets: np.ndarray, item_count: int, floor: float) -> ItemFrequencies:
    """Exact document frequencies of the private data, *declared* public: outside the guarantee."""
    _, item = _distinct(items, offsets, item_count, None)
    counts = np.bincount(item, minlength=item_count + 1)
    return _floored(counts / max(len(offsets) - 1, 1), "assume-public", floor, None)


def _floored(probability: np.ndarray, source: str, floor: float, histogram: np.ndarray | None) -> ItemFrequencies:
    if not 0 < floor <= 1:
        raise PrivacyError(f"floor {floor:g} of the item frequencies is not in (0, 1]")
    bounded = np.clip(probability, floor, 1.0)
    bounded[0] = 1.0
    return ItemFrequencies(bounded, source, floor, histogram)


def _distinct(
    items: np.ndarray, offsets: np.ndarray, item_count: int, last: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(user, item) pairs, each once, without padding, among each user's last events."""
    offsets = np.asarray(offsets)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(items) or (np.diff(offsets) < 0).any():
        raise PrivacyError("offsets must rise from 0 to the number of events, one more than there are users")
    if len(items) and (items.min() < 0 or items.max() > item_count):
        raise PrivacyError(f"an item id is outside 0..{item_count}; the catalogue must hold every item")
    lengths = np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    keep = items != 0
    if last is not None:
        keep &= np.arange(len(items)) >= np.repeat(offsets[1:] - last, lengths)
    pairs = np.unique(user[keep].astype(np.int64) * (item_count + 1) + items[keep])
    return pairs // (item_count + 1), pairs % (item_count + 1)
