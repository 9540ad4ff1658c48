"""Gaussian noise, drawn in one place, by name, from one of three sources.

| mode | bits from | seeded by | for |
|---|---|---|---|
| `system` | SFC64 | 192 bits of OS entropy, fresh for each run | the default |
| `crypto` | ChaCha20 | a 256-bit key of OS entropy, fresh for each run | an adversary who attacks the generator |
| `seeded` | SFC64 | a seed that you give | research: whoever knows the seed can subtract the noise: `insecure` |

`system` is unpredictable at the start, but SFC64 is not a cipher, and its floating-point Gaussians have gaps in their
low bits that an attack with exact outputs might use (Mironov 2012). `crypto` closes both: a stream cipher, Box-Muller
in float64, and each value the scaled sum of four Gaussians, (z_1 + z_2 + z_3 + z_4) / 2, which makes such an attack
solve for four values at once (Holohan and Braghin 2021); the sum with the gradient is taken in float64 too, and
rounded once.

torch's own CPU generator is not used: it keeps only 32 bits of its seed, few enough to try all of them.

Noise is drawn on the CPU, so a run does not depend on the device, and moved to where the gradient is. The state of a
source can be saved, so that a resumed run repeats the same draws. It is a secret: whoever has it can subtract the
noise.
"""

import abc
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dpformer.errors import PrivacyError

MODES = ("system", "crypto", "seeded")


class NoiseSource(abc.ABC):
    """Gaussian noise with a state. Make one with `noise_source`."""

    mode: str
    insecure: bool
    dtype: type[np.floating[Any]]

    @abc.abstractmethod
    def normal(self, count: int) -> np.ndarray:
        """`count` independent standard Gaussian values, of the source's dtype."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """All that is needed to repeat the coming draws, JSON-ready. Secret: keep it readable by the owner only."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same mode."""

    def gaussian(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        """Independent N(0, std^2) values for a release of this shape, float64."""
        if not (np.isfinite(std) and std > 0):
            raise PrivacyError(f"noise std {std:g} is not above 0; a release without noise is not private")
        return std * self.normal(math.prod(shape)).astype(np.float64).reshape(shape)

    def add_noise_(self, gradients: Iterable[tuple[str, torch.Tensor]], std: float) -> None:
        """Add N(0, std^2) to every entry of every gradient, in place, in the order of their names.

        Each parameter must come once. A sum that is not finite is refused before anything is drawn: it is the sign of a
        broken clip, and noise would not hide it.
        """
        if not (np.isfinite(std) and std > 0):
            raise PrivacyError(f"noise std {std:g} is not above 0; a run without noise must say so, with epsilon inf")
        named = sorted(gradients, key=lambda pair: pair[0])
        places = [gradient.data_ptr() for _, gradient in named if gradient.numel()]
        if len({name for name, _ in named}) < len(named) or len(set(places)) < len(places):
            raise PrivacyError("a parameter is listed twice; give every parameter to add_noise_ once")
        for name, gradient in named:
            if not bool(torch.isfinite(gradient).all()):
                raise PrivacyError(f"the clipped sum of parameter {name!r} is not finite; nothing was released")
        for _, gradient in named:
            self._add(gradient, std)

    def _add(self, gradient: torch.Tensor, std: float) -> None:
        drawn = torch.from_numpy(self.normal(gradient.numel())).mul_(std).reshape(gradient.shape)
        # float64 noise is added in float64 and rounded once; some devices have none, so there the sum is on the CPU.
        if self.dtype is np.float64:
            gradient.copy_((gradient.to("cpu", torch.float64) + drawn).to(gradient.dtype))
        else:
            gradient.add_(drawn.to(gradient.device, gradient.dtype))


class GeneratorNoise(NoiseSource):
    """numpy's SFC64, from OS entropy or from a given seed."""

    dtype = np.float32

    def __init__(self, seed: int | None = None) -> None:
        self.mode = "system" if seed is None else "seeded"
        self.insecure = seed is not None
        # SeedSequence keeps 32 bits for each word of its pool; SFC64 takes 192 bits from it.
        entropy = np.random.SeedSequence(secrets.randbits(256) if seed is None else seed, pool_size=8)
        self._generator = np.random.Generator(np.random.SFC64(entropy))

    def normal(self, count: int) -> np.ndarray:
        """Standard Gaussians in float32, by the ziggurat."""
        return self._generator.standard_normal(count, dtype=np.float32)

    def state(self) -> dict[str, Any]:
        """The generator's words, as hexadecimal text."""
        inner: Any = self._generator.bit_generator.state
        words = [f"{int(word):x}" for word in inner["state"]["state"]]
        return {"mode": self.mode, "words": words, "half": [int(inner["has_uint32"]), int(inner["uinteger"])]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        _check_mode(self, state)
        words = np.array([int(word, 16) for word in state["words"]], dtype=np.uint64)
        has, held = state["half"]
        self._generator.bit_generator.state = {
            "bit_generator": "SFC64",
            "state": {"state": words},
            "has_uint32": has,
            "uinteger": held,
        }


class CryptoNoise(NoiseSource):
    """ChaCha20 through Box-Muller in float64, four Gaussians to a value."""

    dtype = np.float64
    mode = "crypto"
    insecure = False

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError as missing:
            raise PrivacyError(
                "noise mode 'crypto' needs the package cryptography: pip install 'dpformer[crypto]'"
            ) from missing
        self._cipher = lambda key, nonce: Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        self._key = secrets.token_bytes(32)
        self._draws = 0

    def _uniform(self, count: int) -> np.ndarray:
        """Multiples of 2^-53 in (0, 1]. Every draw has a nonce of its own: 4 bytes of block counter, 12 of number."""
        nonce = bytes(4) + self._draws.to_bytes(12, "little")
        self._draws += 1
        words = np.frombuffer(self._cipher(self._key, nonce).update(bytes(8 * count)), dtype="<u8")
        return ((words >> np.uint64(11)) + np.uint64(1)) * 2.0**-53

    def normal(self, count: int) -> np.ndarray:
        """Standard Gaussians in float64, each the sum of four from four different Box-Muller pairs, halved.

        The two halves of one pair must not meet in a sum: R cos t + R sin t = sqrt(2) R cos(t - pi/4) would be a single
        Box-Muller value again.
        """
        half = (count + 1) // 2
        result = np.zeros((2, half))
        for _ in range(4):
            radius, angle = self._uniform(2 * half).reshape(2, half)
            radius = np.sqrt(-2 * np.log(radius))
            angle *= 2 * np.pi
            result[0] += radius * np.cos(angle)
            result[1] += radius * np.sin(angle)
        return (result.reshape(-1)[:count]) * 0.5

    def state(self) -> dict[str, Any]:
        """The key, as hexadecimal text, and the number of draws."""
        return {"mode": self.mode, "key": self._key.hex(), "draws": self._draws}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        _check_mode(self, state)
        self._key, self._draws = bytes.fromhex(state["key"]), int(state["draws"])


def noise_source(mode: str = "system", seed: int | None = None) -> NoiseSource:
    """A source of noise: "system" (default), "crypto", or "seeded", which needs a seed and marks the run insecure."""
    if mode not in MODES:
        raise PrivacyError(f"noise mode {mode!r} is not one of {', '.join(MODES)}")
    if (mode == "seeded") != (seed is not None):
        raise PrivacyError("a seed goes with noise mode 'seeded', and only with it: a known seed undoes the noise")
    if mode == "crypto":
        return CryptoNoise()
    return GeneratorNoise(seed)


def _check_mode(source: NoiseSource, state: Mapping[str, Any]) -> None:
    if state.get("mode") != source.mode:
        raise PrivacyError(f"the saved noise state is of mode {state.get('mode')!r}, the run's is {source.mode!r}")
