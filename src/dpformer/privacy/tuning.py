"""The price of trying several settings and keeping the best (Papernot and Steinke 2022).

Choosing the best of many runs on private data leaks too. It can be paid for: draw the number of trials K at random, keep K
secret, give each trial settings drawn at random from a list fixed beforehand, publish only the best. The *score* is paid for too:
each trial has a noisy answer for it, a sum over users of values in [0, 1]. Counted by RDP: PLD does not support it.
"""

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.optimize import brentq

from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import Charge, check_delta, check_epsilon, event, rdp_epsilon, scaled
from dpformer.privacy.calibration import smallest_noise

SHAPES = {"geometric": 1.0, "logarithmic": 0.0}


@dataclass(frozen=True)
class Tuning:
    """How many trials are drawn: K >= 1 with mean `trials`, "geometric" or "logarithmic" (cheaper, more often one).

    `score_noise_multiplier` is the noise on the *sum* over users of each trial's score, so the mean score of N users is off by
    score_noise_multiplier / N.
    """

    trials: float
    distribution: str = "geometric"
    score_noise_multiplier: float = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.trials) and self.trials > 1):
            raise PrivacyError(f"the mean number of trials, {self.trials:g}, is not above 1; one trial needs no tuning")
        if self.distribution not in SHAPES:
            raise PrivacyError(f"the distribution of trials {self.distribution!r} is not one of {', '.join(SHAPES)}")
        if not self.score_noise_multiplier > 0:
            raise PrivacyError("the score's noise multiplier is not above 0; an exact score is not private")

    def draw(self, generator: np.random.Generator | None = None) -> int:
        """Draw the number of trials, from OS entropy unless a generator is given (research only).

        The guarantee assumes that the number stays secret.
        """
        generator = generator or np.random.default_rng(secrets.randbits(256))
        if self.distribution == "geometric":
            return int(generator.geometric(1 / self.trials))
        # The logarithmic distribution with parameter p has mean -p / ((1 - p) ln(1 - p)).
        p = brentq(lambda p: -p / ((1 - p) * math.log1p(-p)) - self.trials, 1e-12, 1 - 1e-12)
        return int(generator.logseries(p))


def tuned_epsilon(charges: Iterable[Charge], tuning: Tuning, delta: float, threshold_delta: float = 0.0) -> float:
    """Epsilon of the best of a random number of runs of these charges, each with a noisy score and threshold. By RDP."""
    check_delta(delta)
    left = delta - tuning.trials * threshold_delta
    if left <= 0:
        each = f"{tuning.trials:g} trials with a threshold delta of {threshold_delta:g} each"
        raise PrivacyError(f"{each} leave nothing of delta {delta:g}; lower the trials")
    trial = event([*charges, Charge("score", tuning.score_noise_multiplier)])
    return rdp_epsilon(RepeatAndSelectDpEvent(trial, tuning.trials, SHAPES[tuning.distribution]), left)


def tuned_factor(charges: Sequence[Charge], tuning: Tuning, epsilon: float, delta: float) -> float:
    """The smallest factor on the noise multipliers of a trial with which the *whole tuning* is (epsilon, delta)-DP."""
    check_epsilon(epsilon)
    if not math.isfinite(epsilon) or not charges:
        raise PrivacyError("tuning is priced for a finite epsilon and a trial that asks something")

    try:
        return smallest_noise(lambda factor: tuned_epsilon(scaled(charges, factor), tuning, delta), epsilon, 1.0)
    except PrivacyError:
        raise PrivacyError(
            f"no noise pays for {tuning.trials:g} trials within epsilon {epsilon:g}: the noisy scores alone spend it; raise the "
            "score's noise multiplier or lower the trials"
        ) from None
