"""Exact noise: whole numbers with the law of a rounded ideal Gaussian, and Poisson draws, from a stream cipher.

K = floor(s Z + 1/2), Z ~ N(0, 1), with exactly this law (given ideal bits of ChaCha20). For a whole number Q,

    Q + K = floor(Q + s Z + 1/2),

so Q + K is post-processing of the ideal Gaussian mechanism. Floating-point noise has no such property: its low bits reveal which
sums are possible (Mironov 2012). The law is exact by interval refining (Haney et al. 2022): two 64-bit words go through
Box-Muller in float64, with a bound on all that rounding and the bits not drawn can change. Where a rounding boundary lies within
the bound (some values in a million) the value is computed again from 256 further bits in 400-bit arithmetic. So the integers do
not depend on the processor or on the version of a library. Proof: docs/proofs/noise.md.
"""

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor

import mpmath
import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpformer.errors import PrivacyError

# Pairs in a chunk: five float64 arrays of this length stay in a core's cache.
_CHUNK = 1 << 14
# What float64 can change in r cos(t) and r sin(t), with a factor of about 4 to spare. The radius r = sqrt(-2 log u): u has
# an absolute error below 2^-53 + 2^-64 (the conversion of the word, the sum with 1/2, the bits not drawn), so log u has
# 2^-53 / u + 2 ulp, and r that divided by r: at most _LOG / (u r). The angle has a relative error of 3 x 2^-53, at most
# pi times that absolutely; sin, cos, sqrt and the products add some ulp: in all below _RELATIVE r.
_LOG, _RELATIVE = 2.0**-51, 2.0**-47
_SMALLEST_STD, _LARGEST_STD = 1.0, 2.0**40
# No value is further from 0 than this many standard deviations: u is at least 2^-320, and sqrt(-2 log u) at most 21.1.
FARTHEST = 22
# Further bits, and the precision with which they are used.
_MORE_BITS, _PRECISION = 256, 400

# Streams of one key: the Gaussians' words, their further bits, Poisson draws, dropout masks.
_WORDS, _REFINED, _POISSON = 0, 1, 2


def random_words(key: bytes, count: int, stream: int, block: int = 0) -> np.ndarray:
    """uint64 [count] of ChaCha20 under `key`, from 64-byte block `block` on. Another `stream` has other words."""
    nonce = block.to_bytes(4, "little") + stream.to_bytes(12, "little")
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8")


def check_std(std: float) -> None:
    """Refuse noise that `rounded_gaussian` cannot draw. std: in grid steps."""
    if not _SMALLEST_STD <= std <= _LARGEST_STD:
        raise PrivacyError(
            f"noise of {std:g} grid steps is not between 1 and 2^40; nothing was released; choose another epsilon"
        )


def rounded_gaussian(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    """int64 `shape`: independent floor(std Z + 1/2), Z ~ N(0, 1), exactly. `std` counts grid steps, 1 to 2^40."""
    check_std(std)
    if torch.get_num_threads() == 1:
        return _draw(key, shape, std)
    return _thread(os.getpid()).submit(_draw, key, shape, std).result()


@functools.cache
def _thread(process: int) -> ThreadPoolExecutor:
    """A thread in which torch has one thread: with more threads, operations this small spend most of the time waiting.

    process: the id of this process; a fork has none of its parent's threads.
    """
    return ThreadPoolExecutor(1, "dpformer-noise", torch.set_num_threads, (1,))


def _draw(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    count = math.prod(shape)
    pairs = (count + 1) // 2
    result = torch.empty(2 * pairs, dtype=torch.int64)
    size = min(_CHUNK, pairs)
    stream = Cipher(algorithms.ChaCha20(key, bytes(4) + _WORDS.to_bytes(12, "little")), mode=None).encryptor()
    zeros, raw = bytes(16 * size), bytearray(16 * size + 64)
    words = torch.from_numpy(np.frombuffer(raw, dtype="<i8", count=2 * size)) if size else result
    buffers, certain = torch.empty(5, size, dtype=torch.float64), torch.empty(size, dtype=torch.bool)
    for start in range(0, pairs, max(size, 1)):
        n = min(size, pairs - start)
        stream.update_into(zeros[: 16 * n], raw)
        # A chunk's words: first those of the radius, then those of the angle.
        out = result[2 * start : 2 * (start + n)]
        _round_pairs(key, words[:n], words[n : 2 * n], start, std, buffers[:, :n], certain[:n], out)
    return result[:count].numpy().reshape(shape)


def _round_pairs(
    key: bytes,
    radius_words: torch.Tensor,
    angle_words: torch.Tensor,
    start: int,
    std: float,
    buffers: torch.Tensor,
    certain: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The rounded pairs of some words, the cosines first. start: the place of the first pair in the whole draw."""
    n = len(radius_words)
    u, radius, value, whole, room = buffers
    # u = (word + 2^63) / 2^64 in [0, 1): the word is signed.
    u.copy_(radius_words).mul_(2.0**-64).add_(0.5)
    # abs, not a negative factor: where u is 1 in float64 that would make -0, and the room below positive.
    torch.log(u, out=radius).abs_().mul_(2.0).sqrt_()
    # room: how far from a whole number a value may be to be certain, 1/2 - std (LOG / (u r) + RELATIVE r).
    torch.mul(u, radius, out=room).reciprocal_().mul_(-std * _LOG).add_(radius, alpha=-std * _RELATIVE).add_(0.5)
    radius.mul_(std)
    u.copy_(angle_words).mul_(math.pi * 2.0**-63)  # the angle, in [-pi, pi)
    for half, function in enumerate((torch.cos, torch.sin)):
        function(u, out=value).mul_(radius)
        torch.round(value, out=whole)
        out[half * n : (half + 1) * n].copy_(whole)
        torch.lt(value.sub_(whole).abs_(), room, out=certain)  # false for NaN too
        if not bool(certain.all()):
            for k in torch.nonzero(~certain).flatten().tolist():
                out[half * n + k] = refined(key, int(radius_words[k]), int(angle_words[k]), start + k, bool(half), std)


def refined(key: bytes, radius_word: int, angle_word: int, pair: int, sine: bool, std: float) -> int:
    """The same value from 64 + 256 bits in 400-bit arithmetic."""
    more = random_words(key, 8, _REFINED, block=pair)  # one 64-byte block for each pair
    radius_bits, angle_bits = (
        sum(int(word) << (64 * j) for j, word in enumerate(more[start : start + 4])) for start in (0, 4)
    )
    with mpmath.workprec(_PRECISION):
        u = mpmath.ldexp(((radius_word + 2**63) << _MORE_BITS) + radius_bits, -64 - _MORE_BITS)
        if u == 0:
            raise PrivacyError("320 zero bits in a row: the cipher is broken; nothing was released")
        angle = mpmath.ldexp((angle_word << _MORE_BITS) + angle_bits, -63 - _MORE_BITS) * mpmath.pi
        value = mpmath.mpf(std) * mpmath.sqrt(-2 * mpmath.log(u)) * (mpmath.sin(angle) if sine else mpmath.cos(angle))
        whole = mpmath.floor(value + 0.5)
        above = value + mpmath.mpf(0.5) - whole
        if min(above, 1 - above) < mpmath.ldexp(1, -150):
            raise PrivacyError("a value is undecided after 320 bits: the cipher is broken; nothing was released")
        return int(whole)


def poisson_draw(key: bytes, users: int, rate: float) -> np.ndarray:
    """Places of the users drawn, int64, ascending: user i if the i-th 64-bit word is below floor(rate 2^64).

    So each user is drawn independently with probability floor(rate 2^64) / 2^64, never above the rate.
    """
    if not 0 < rate <= 1:
        raise PrivacyError(f"sampling rate {rate:g} is not in (0, 1]")
    if rate == 1:
        return np.arange(users)
    bound = np.uint64(math.floor(math.ldexp(rate, 64)))
    return np.flatnonzero(random_words(key, users, _POISSON) < bound)


def kept_by_dropout(key: bytes, user: int, call: int, count: int, rate: float) -> np.ndarray:
    """bool [count]: the values that one user keeps in one call of dropout. A function of key, user and call alone.

    A longer mask begins with the shorter one, so padding does not matter. 16 bits each: a value is dropped with probability
    floor(rate 2^16) / 2^16.
    """
    nonce = bytes(4) + call.to_bytes(4, "little") + (user + 1).to_bytes(8, "little")
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(2 * count)), dtype="<u2") >= math.floor(rate * 65536)
