"""The sampler of the noise: its integers against 400-bit arithmetic, its stated error bound, its law, its streams.

All keys are fixed, so a test either passes always or never: the levels below say how surprising a failure would have been.
A planted sampler stands beside each test that claims to see it.
"""

import functools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy.stats import chisquare, kstest, norm

from dpformer.errors import PrivacyError
from dpformer.privacy import noise
from dpformer.privacy.noise import random_words, refined, rounded_gaussian

KEY = bytes(range(32))
TINY = 1e-6
"""The level of every statistical test: an honest sampler fails one in a million keys."""
STDS = [2.0**26, 1.08 * 2**26, 2.5, 2.0**40]
BITS = 320
"""Binary digits after the point in the reference's normal values."""


# --- an implementation of its own: one value at a time, from the definition --------------------------------------------


def key_stream(key: bytes, count: int, stream: int, block: int = 0) -> list[int]:
    nonce = block.to_bytes(4, "little") + stream.to_bytes(12, "little")
    data = Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(8 * count))
    return [int.from_bytes(data[8 * n : 8 * n + 8], "little") for n in range(count)]


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def joined(words: list[int]) -> int:
    return sum(word << (64 * n) for n, word in enumerate(words))


def normal_pair(key: bytes, pair: int, radius: int, angle: int) -> tuple[int, int]:
    """floor(2^320 Z) of both values of a pair. Both words are signed: u = 1/2 + radius / 2^64, turns = angle / 2^64."""
    more = key_stream(key, 8, 1, pair)
    with mpmath.workprec(420):
        u = mpmath.mpf((signed(radius) + 2**63 << 256) + joined(more[:4])) / 2**320
        turn = mpmath.mpf((signed(angle) << 256) + joined(more[4:])) / 2**320
        r = mpmath.sqrt(-2 * mpmath.log(u))
        cosine, sine = mpmath.cospi(2 * turn), mpmath.sinpi(2 * turn)
        return tuple(int(mpmath.floor(r * value * 2**BITS)) for value in (cosine, sine))


def rounded(z: int, std: float) -> int:
    """floor(std Z + 1/2) in whole numbers, for z = floor(2^320 Z)."""
    exact = Fraction(std)
    scaled, unit = 2 * exact.numerator * z, 2 * exact.denominator << BITS
    return (scaled + unit // 2) // unit


def places(count: int, chunk: int):
    """(pair, place of its radius word, of its angle word; the places of its two values are the same) of a draw."""
    pairs = (count + 1) // 2
    for start in range(0, pairs, chunk):
        n = min(chunk, pairs - start)
        for k in range(n):
            yield start + k, 2 * start + k, 2 * start + n + k


def reference(key: bytes, count: int, chunk: int, std: float) -> np.ndarray:
    words = key_stream(key, count + count % 2, 0)
    result = np.zeros(count + count % 2, dtype=np.int64)
    for pair, first, second in places(count, chunk):
        z = normal_pair(key, pair, words[first], words[second])
        result[[first, second]] = [rounded(value, std) for value in z]
    return result[:count]


@functools.cache
def many() -> list[tuple[int, int, int, tuple[int, int]]]:
    """10,000 pairs of one draw: words and both values."""
    words = key_stream(KEY, 20_000, 0)
    return [
        (pair, words[a], words[b], normal_pair(KEY, pair, words[a], words[b]))
        for pair, a, b in places(20_000, noise._CHUNK)
    ]


def wrong_integers(drawn: np.ndarray, std: float) -> int:
    """How many of 20,000 values under `KEY` are not those of the reference."""
    expected = [[rounded(z, std) for z in pair[-1]] for pair in many()]
    return int((np.array(expected) != drawn.reshape(2, -1).T).sum())


def in_float64(key: bytes, shape: tuple[int, ...], std: float, dtype=np.float64) -> np.ndarray:
    """The planted sampler: Box-Muller of the same words in floating point alone."""
    count = math.prod(shape)
    words = random_words(key, count, 0).view(np.int64).reshape(2, -1)
    radius = np.sqrt(-2 * np.log(words[0] * 2.0**-64 + 0.5))
    angle = words[1] * (math.pi * 2.0**-63)
    z = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).astype(dtype)
    return np.floor(z * dtype(std) + dtype(0.5)).astype(np.int64).reshape(shape)


def in_float32(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    return in_float64(key, shape, std, np.float32)


def halved(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    return rounded_gaussian(key, shape, std / 2)


# --- exact integers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", STDS)
def test_none_of_20_000_integers_differs_from_400_bit_arithmetic(std):
    assert wrong_integers(rounded_gaussian(KEY, (20_000,), std), std) == 0


def test_floating_point_alone_has_wrong_integers():
    """The controls. At a std of 2^40 float64 is wrong by up to 2^-12, so that a few of 20,000 are rounded to another integer."""
    assert wrong_integers(in_float64(KEY, (20_000,), 2.0**40), 2.0**40) > 0
    assert wrong_integers(in_float32(KEY, (20_000,), 2.0**26), 2.0**26) > 10_000


@pytest.mark.parametrize("std", [2.0**26, 2.5])
def test_the_second_look_agrees_with_the_reference(std):
    """`refined` on values that did not need it: the same integers."""
    for pair, radius, angle, z in many()[:500]:
        for sine in (False, True):
            assert refined(KEY, signed(radius), signed(angle), pair, sine, std) == rounded(z[sine], std)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 15, 16, 17, 37, 48])
def test_chunk_borders_and_odd_counts(monkeypatch, count):
    monkeypatch.setattr(noise, "_CHUNK", 8)
    drawn = rounded_gaussian(KEY, (count,), 1.08 * 2**26)
    assert drawn.shape == (count,)
    assert drawn.dtype == np.int64
    np.testing.assert_array_equal(drawn, reference(KEY, count, 8, 1.08 * 2**26))


def test_the_border_of_a_real_chunk():
    count, std = 2 * noise._CHUNK + 5, 2.0**26
    drawn, words = rounded_gaussian(KEY, (count,), std), key_stream(KEY, count + 1, 0)
    for pair, first, second in list(places(count, noise._CHUNK))[-8:]:
        z = normal_pair(KEY, pair, words[first], words[second])
        assert drawn[first] == rounded(z[0], std)
        if second < count:
            assert drawn[second] == rounded(z[1], std)


def hard_words() -> tuple[list[int], list[int]]:
    """Radius words with u near 0 and 1 and between, each with angles on, near and off the axes."""
    near_0 = [*range(12), *(2**n + d for n in range(4, 63, 3) for d in (-1, 0, 1))]
    u = near_0 + [2**64 - 1 - word for word in near_0]
    generator = np.random.default_rng(0)
    angles = [((n << 61) + d) % 2**64 for n in range(8) for d in (-(2**40), -1, 0, 1, 2**40)]
    angles += generator.integers(0, 2**64, 8, dtype=np.uint64).tolist()
    chosen = generator.integers(0, len(angles), (len(u), 6))
    pairs = [((word + 2**63) % 2**64, angles[n]) for word, row in zip(u, chosen, strict=True) for n in row]
    return [radius for radius, _ in pairs], [angle for _, angle in pairs]


def round_words(radius: list[int], angle: list[int], std: float) -> tuple[np.ndarray, torch.Tensor]:
    """The integers [2, n] of given words, and the buffers that the pair function leaves behind."""
    n = len(radius)
    words = [torch.tensor([signed(word) for word in both]) for both in (radius, angle)]
    buffers, out = torch.full((5, n), math.nan, dtype=torch.float64), torch.empty(2 * n, dtype=torch.int64)
    noise._round_pairs(KEY, *words, 0, std, buffers, torch.empty(n, dtype=torch.bool), out)
    return out.numpy().reshape(2, n), buffers


@functools.cache
def hard_values() -> list[tuple[int, int]]:
    return [normal_pair(KEY, pair, *words) for pair, words in enumerate(zip(*hard_words(), strict=True))]


def wrong_hard_integers(std: float) -> int:
    drawn, _ = round_words(*hard_words(), std)
    return int((drawn != np.array([[rounded(z, std) for z in pair] for pair in hard_values()]).T).sum())


@pytest.mark.parametrize("std", STDS)
def test_hard_words_are_rounded_exactly(std):
    """Words for which u is 0 or 1 in float64, or has few exact bits, and angles on the axes, where a value is near 0."""
    assert wrong_hard_integers(std) == 0


def test_ignoring_the_bits_not_drawn_would_be_seen(monkeypatch):
    """The control: a second look that takes the further bits for 1 and then zeros, so that only the words count."""
    monkeypatch.setattr(noise, "random_words", lambda key, count, stream, block=0: np.array([1] * count, dtype="<u8"))
    assert wrong_hard_integers(2.0**26) > 100


def test_a_bound_that_is_too_small_would_be_seen(monkeypatch):
    """The control: without the term for u, values with a small u would pass as certain."""
    monkeypatch.setattr(noise, "_LOG", 0.0)
    assert wrong_hard_integers(2.0**26) > 10


@pytest.mark.parametrize("function", ["sin", "cos"])
@pytest.mark.parametrize("std", [1.0, 1.08 * 2**26])
def test_the_error_stays_below_its_stated_bound(monkeypatch, function, std):
    """|value in float64 - exact value| against 1/2 - room, with the bits not drawn all 0 and all 1: below 1, and not tiny."""
    monkeypatch.setattr(torch, "sin", getattr(torch, function))  # the pair function leaves its last half in the buffers
    radius, angle = hard_words()
    generator = np.random.default_rng(1)
    radius += generator.integers(0, 2**64, 500, dtype=np.uint64).tolist()
    angle += generator.integers(0, 2**64, 500, dtype=np.uint64).tolist()
    _, buffers = round_words(radius, angle, std)
    _, _, distance, whole, room = buffers.tolist()
    largest = 0.0
    with mpmath.workprec(420):
        for n, words in enumerate((signed(a) + 2**63, signed(b)) for a, b in zip(radius, angle, strict=True)):
            if not room[n] > 0:  # never certain, whatever the value
                continue
            assert room[n] < 0.5
            for more in (0, 1):
                u, turn = (mpmath.mpf(word + more) / 2**64 for word in words)
                exact = std * mpmath.sqrt(-2 * mpmath.log(u)) * getattr(mpmath, f"{function}pi")(2 * turn)
                error = abs(abs(exact - whole[n]) - distance[n])
                largest = max(largest, float(error / (mpmath.mpf(0.5) - room[n])))
    assert 0.001 < largest < 0.5


# --- the law ----------------------------------------------------------------------------------------------------------


@functools.cache
def draw(sampler, std: float, count: int = 200_000, key: bytes = KEY) -> np.ndarray:
    return sampler(key, (count,), std).astype(np.float64)


def test_a_ks_test_accepts_the_std_and_rejects_others():
    for std in (2.0**26, 1.08 * 2**26):
        values = draw(rounded_gaussian, std)
        assert kstest(values, norm(0, std).cdf).pvalue > TINY
        for wrong in (0.7, 1.05, 0.95):
            assert kstest(values, norm(0, std * wrong).cdf).pvalue < 1e-9
    assert kstest(draw(halved, 2.0**26), norm(0, 2.0**26).cdf).pvalue < 1e-12


def test_moments_and_tails():
    z = draw(rounded_gaussian, 2.0**26) / 2.0**26
    n = len(z)
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for far in (2.5, 3.5, 4.0):
        expected = n * 2 * norm.sf(far)
        assert abs((np.abs(z) > far).sum() - expected) < 6 * math.sqrt(expected)


def small_std_p_value(sampler, std: float) -> float:
    """Chi-square of P(K = k) = Phi((k + .5) / s) - Phi((k - .5) / s), with the ends beyond 4 s put together."""
    drawn, end = draw(sampler, std), math.ceil(3.5 * std)
    edges = (np.arange(-end, end + 1) + 0.5) / std
    probability = np.diff(np.concatenate([[0.0], norm.cdf(edges), [1.0]]))
    counts = np.bincount(np.clip(drawn, -end, end + 1).astype(np.int64) + end, minlength=2 * end + 2)
    return float(chisquare(counts, probability * len(drawn)).pvalue)


def cut(key, shape, std):
    return np.trunc(in_float64(key, shape, std * 2.0**20) / 2.0**20)


def discrete_gaussian(key, shape, std):
    """Another law: P(K = k) in proportion to exp(-k^2 / 2 s^2)."""
    k = np.arange(-40, 41)
    weight = np.exp(-(k**2) / (2 * std**2))
    return np.random.default_rng(0).choice(k, size=shape, p=weight / weight.sum())


@pytest.mark.parametrize("std", [1.0, 1.7, 3.0])
def test_the_probabilities_at_a_small_std_are_those_of_a_rounded_gaussian(std):
    assert small_std_p_value(rounded_gaussian, std) > TINY
    assert small_std_p_value(cut, std) < 1e-12


def test_other_laws_are_seen_at_a_small_std():
    assert small_std_p_value(discrete_gaussian, 1.0) < 1e-12
    assert small_std_p_value(halved, 3.0) < 1e-12


def low_bits_p_value(sampler) -> float:
    """Chi-square of the four lowest bits at the std in use: uniform, to far below what 200,000 values can show."""
    return float(chisquare(np.bincount(draw(sampler, 2.0**26).astype(np.int64) & 15, minlength=16)).pvalue)


def test_low_bits_are_uniform():
    """They are what gave float noise away: a float32 Gaussian of this size is a multiple of 4 most of the time."""
    assert low_bits_p_value(rounded_gaussian) > TINY
    assert low_bits_p_value(in_float32) < 1e-12


def test_halves_chunks_arrays_and_neighbours_are_independent():
    """Values and squares: a radius shared in a wrong way would leave values uncorrelated, yet dependent."""
    n = 2 * noise._CHUNK
    drawn = draw(rounded_gaussian, 2.0**26, 3 * n) / 2.0**26
    other = draw(rounded_gaussian, 2.0**26, n, bytes(32)) / 2.0**26
    half = n // 2
    samples = {
        "cosines": drawn[:half],
        "sines": drawn[half:n],
        "next chunk, cosines": drawn[n : n + half],
        "next chunk, sines": drawn[n + half : 2 * n],
        "another key": other[:half],
        "neighbours": np.roll(drawn[:half], 1),
    }
    for power in (1, 2):
        correlation = np.corrcoef(np.stack([value**power for value in samples.values()]))
        off = correlation[~np.eye(len(samples), dtype=bool)]
        assert np.abs(off).max() < 5.5 / math.sqrt(half)
    # The control: both values of a pair with the radius of the pair, and an angle of their own.
    radius = np.hypot(drawn[:half], drawn[half:n])
    twice = radius * np.cos(2 * np.pi * random_words(KEY, half, 7) / 2.0**64)
    assert abs(np.corrcoef(drawn[:half], twice)[0, 1]) < 5.5 / math.sqrt(half)
    assert np.corrcoef(drawn[:half] ** 2, twice**2)[0, 1] > 0.1


# --- keys, shapes, refusals -------------------------------------------------------------------------------------------


def test_a_key_gives_the_same_noise_and_another_key_other_noise():
    first = rounded_gaussian(KEY, (30, 7), 100.0)
    np.testing.assert_array_equal(first, rounded_gaussian(KEY, (30, 7), 100.0))
    assert (first != rounded_gaussian(bytes(32), (30, 7), 100.0)).mean() > 0.9
    np.testing.assert_array_equal(first.ravel(), rounded_gaussian(KEY, (210,), 100.0))


def test_the_result_can_be_written_to_and_is_nobody_elses():
    first, second = (rounded_gaussian(KEY, (9,), 5.0) for _ in range(2))
    first += 1
    np.testing.assert_array_equal(first - 1, second)


def test_no_values_and_one_value():
    assert rounded_gaussian(KEY, (0,), 2.0).shape == (0,)
    assert rounded_gaussian(KEY, (3, 0), 2.0).shape == (3, 0)
    assert rounded_gaussian(KEY, (), 2.0).shape == ()


@pytest.mark.parametrize("std", [0.0, -1.0, 0.999, 2.0**40 * 1.001, math.inf, math.nan])
def test_a_std_without_a_proof_is_refused(std):
    with pytest.raises(PrivacyError, match="grid steps"):
        rounded_gaussian(KEY, (2,), std)


def test_words_are_those_of_the_published_cipher():
    """The key stream of RFC 8439, section 2.3.2: counter 1, nonce 00 00 00 09 00 00 00 4a 00 00 00 00."""
    stream = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
    published = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert random_words(KEY, 8, stream, block=1).tobytes() == published


def test_streams_and_blocks_of_one_key_do_not_overlap():
    first = random_words(KEY, 64, 0)
    np.testing.assert_array_equal(random_words(KEY, 56, 0, block=1), first[8:])
    words = np.concatenate([random_words(KEY, 1000, stream) for stream in range(3)])
    assert len(np.unique(words)) == 3000
