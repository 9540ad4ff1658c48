"""Poisson draws and dropout masks: rates that are never above what is accounted, and nobody's draw depends on others."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from dpformer.errors import PrivacyError
from dpformer.privacy import noise
from dpformer.privacy.noise import kept_by_dropout, poisson_draw, random_words

KEY = bytes(range(32))
TINY = 1e-6
"""The level of every statistical test. Keys are fixed, so a test either passes always or never."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def drawn_often(draw, users: int, rate: float, times: int) -> np.ndarray:
    """bool [times, users]."""
    result = np.zeros((times, users), dtype=bool)
    for n in range(times):
        result[n, draw(key(n), users, rate)] = True
    return result


def fixed_size(key: bytes, users: int, rate: float) -> np.ndarray:
    """The planted sampler: batches of one size, as a shuffled epoch has them."""
    return np.sort(np.argsort(random_words(key, users, 9))[: round(rate * users)])


# --- Poisson ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.003, 0.17, 0.5, 0.97])
def test_everybody_is_drawn_with_the_rate(rate):
    table = drawn_often(poisson_draw, 500, rate, 400)
    assert binomtest(int(table.sum()), table.size, rate).pvalue > TINY
    # Each user's own count: chi-square with 500 terms of variance 400 q (1 - q).
    counts = (table.sum(axis=0) - 400 * rate) ** 2 / (400 * rate * (1 - rate))
    assert abs(counts.sum() - 500) < 6 * math.sqrt(2 * 500 * max(1.0, 1 / (400 * rate * (1 - rate))))


def test_draws_are_independent_between_users_and_steps():
    table = drawn_often(poisson_draw, 200, 0.3, 600).astype(float)
    for correlation in (np.corrcoef(table.T), np.corrcoef(table)):
        off = correlation[~np.eye(len(correlation), dtype=bool)]
        bound = 5.5 / math.sqrt(table.shape[0] if len(correlation) == 200 else table.shape[1])
        assert np.abs(off).max() < 1.1 * bound


def size_p_value(draw, rate: float) -> float:
    """Chi-square of the variance of the batch size, N q (1 - q), from 2,000 batches: a z-test on s^2."""
    sizes = drawn_often(draw, 300, rate, 2000).sum(axis=1)
    ratio = sizes.var(ddof=1) / (300 * rate * (1 - rate))
    return math.erfc(abs(ratio - 1) / math.sqrt(2 / 1999) / math.sqrt(2))


def test_the_batch_size_varies_as_it_must_and_a_fixed_size_is_seen():
    assert size_p_value(poisson_draw, 0.2) > TINY
    assert size_p_value(fixed_size, 0.2) < 1e-12


def test_a_draw_depends_on_the_users_place_and_not_on_how_many_there_are():
    short, long = poisson_draw(KEY, 100, 0.4), poisson_draw(KEY, 1000, 0.4)
    np.testing.assert_array_equal(long[long < 100], short)
    assert (np.diff(long) > 0).all()
    assert long.dtype == np.int64


def test_rate_1_is_everybody():
    np.testing.assert_array_equal(poisson_draw(KEY, 7, 1.0), np.arange(7))


def rates() -> list[float]:
    generator = np.random.default_rng(0)
    random = generator.random(200).tolist()
    return [
        *random,
        *(2.0**-n for n in range(1, 70, 7)),
        1 - 2.0**-53,
        math.nextafter(0.5, 1),
        1 / 3,
        1024 / 6040,
        5e-324,
    ]


def test_the_threshold_is_the_floor_and_never_above_the_rate(monkeypatch):
    """Words at the threshold and beside it, put in place of the cipher's: drawn exactly if below floor(rate 2^64)."""
    for rate in rates():
        bound = math.floor(Fraction(rate) * 2**64)
        assert Fraction(bound, 2**64) <= Fraction(rate) < Fraction(bound + 1, 2**64)
        beside = [word for word in (bound - 1, bound, bound + 1, 0, 2**64 - 1) if 0 <= word < 2**64]
        monkeypatch.setattr(noise, "random_words", lambda *_, words=beside: np.array(words, dtype="<u8"))
        found = poisson_draw(KEY, len(beside), rate)
        assert found.tolist() == [n for n, word in enumerate(beside) if word < bound], rate


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(PrivacyError, match="sampling rate"):
        poisson_draw(KEY, 3, rate)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_a_mask_is_a_function_of_key_user_and_call():
    base = kept_by_dropout(KEY, 3, 1, 400, 0.5)
    np.testing.assert_array_equal(base, kept_by_dropout(KEY, 3, 1, 400, 0.5))
    others = [(key(1), 3, 1), (KEY, 4, 1), (KEY, 3, 2), (KEY, 1, 3), (KEY, 2**40, 1)]
    for other in others:
        agree = (base == kept_by_dropout(*other, 400, 0.5)).sum()
        assert binomtest(int(agree), 400, 0.5).pvalue > TINY


def test_a_longer_mask_begins_with_the_shorter_one():
    long = kept_by_dropout(KEY, 5, 0, 1000, 0.2)
    for count in (0, 1, 31, 32, 33, 999):
        np.testing.assert_array_equal(kept_by_dropout(KEY, 5, 0, count, 0.2), long[:count])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.2, 0.5])
def test_the_share_that_is_dropped(rate):
    kept = np.concatenate([kept_by_dropout(KEY, user, 0, 2000, rate) for user in range(100)])
    if rate == 0:
        assert kept.all()
    else:
        assert binomtest(int((~kept).sum()), len(kept), math.floor(rate * 2**16) / 2**16).pvalue > TINY


def test_masks_of_users_and_calls_are_independent():
    masks = np.stack([kept_by_dropout(KEY, user, call, 3000, 0.5) for user in range(12) for call in range(4)])
    off = np.corrcoef(masks)[~np.eye(len(masks), dtype=bool)]
    assert np.abs(off).max() < 5.5 / math.sqrt(3000)
    # Pairs of neighbouring values in one mask: all four cases alike.
    pairs = 2 * masks[:, 0::2].astype(int) + masks[:, 1::2]
    assert chisquare(np.bincount(pairs.ravel(), minlength=4)).pvalue > TINY


def test_the_padding_users_mask_is_its_own():
    """User -1 stands for padding rows."""
    assert not np.array_equal(kept_by_dropout(KEY, -1, 0, 200, 0.5), kept_by_dropout(KEY, 0, 0, 200, 0.5))
