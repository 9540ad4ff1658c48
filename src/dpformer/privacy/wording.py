"""The words of the privacy statement. Upper bounds are rounded up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpformer.privacy.statement import AccountPart, AlonePart, PrivacyStatement

UNIT = "one user, with all of that user's events"
NEIGHBOURS = "the number of users stays, and one user's events are replaced by none"
NOT_COVERED = (
    "the history that a served user hands in to get recommendations: it is used, not learned from",
    "losses, gradient norms, clip rates, metrics on private data, logs: they carry no noise; do not publish them",
    "the state kept for resuming a run (weights, keys of the noise and of the samples): secret, and deleted when the run ends",
    "the person or company that runs the training: they hold the data",
)
GENERATORS = {
    "exact": "whole numbers with the law of a rounded ideal Gaussian, from ChaCha20 with a 256-bit key of OS entropy",
    "seeded": "whole numbers with the law of a rounded ideal Gaussian, from ChaCha20 with a key made from a given seed",
    "none": "no noise",
}
GRID = (
    "Every released number is a whole multiple of a public step: 2^-26 of the largest power of 2 up to the norm bound (finer "
    "above 2^24 numbers)"
)
SEEDED = "the noise came from a given seed and can be subtracted: for research, never to publish"
# Before a condition that a model has from the runs that its prior is of.
EARLIER = "of earlier runs that the model uses: "
TUNED = "One trial is shown here; the tuning is counted by RDP, and epsilon includes it."
_CATALOGUES = {
    "public": "The set of items was given from outside of the log and is public.",
    "log": "The set of items is ASSUMED public: it was taken from the log, so a rare item reveals that a user had it. "
    "Declare it with --catalogue FILE, or have it chosen privately with --catalogue private.",
    "private": "The set of items was chosen by noisy counts above a threshold; delta includes {delta:g} for it.",
    "none": "The model's initial weights, vocabulary and labels are ASSUMED public: not taken from this data.",
}
_ALONE = (
    "Epsilon is of this run alone: other releases on the same people add to it, and it was charged to no account of these people "
    "(--account)."
)
_TUNING = {
    "undeclared": "NOT DECLARED: if settings were chosen by looking at results on this data, that choice is not in epsilon",
    "none": "none; the settings were fixed beforehand",
    "public": "on public data only",
    "listed": "NOT accounted; {count} configurations were tried on this data: {tried}",
    "accounted": "accounted: {trials:g} trials on average ({distribution}), included in epsilon",
}
_ACCOUNTANTS = {"pld": "PLD", "rdp": "RDP", "gaussian": "closed form for Gaussians"}


def in_words(s: PrivacyStatement) -> str:
    """The statement for people, some lines."""
    lines = [f"INSECURE: {reason}" for reason in s.insecure]
    if not s.private:
        lines.append("NOT PRIVATE: trained without noise (epsilon inf). Anyone's data may be read from it.")
        lines += [f"OUTSIDE OF THE GUARANTEE: {what}" for what in s.data.outside_guarantee]
        return "\n".join(lines)
    lines += [
        f"{_pair(s)}-differential privacy for {s.unit}.",
        f"Neighbours: {s.neighbours}.",
        _CATALOGUES[s.data.catalogue].format(delta=round_up(s.data.threshold_delta, 2)),
        *(f"OUTSIDE OF THE GUARANTEE: {what}" for what in s.data.outside_guarantee),
        _ALONE if s.account is None else _together(s.account, s.alone),
        f"At delta = 1/users = {1 / s.users:.3g}: epsilon {_bound(s.epsilon_at_delta_1_over_users)}.",
        s.attack.reading,
        f"Accountant: {_ACCOUNTANTS[s.accountant.used]} of {s.accountant.library} {s.accountant.version} "
        f"(PLD {_bound(s.accountant.pld)}, RDP {_bound(s.accountant.rdp)}). {s.accountant.note}".rstrip(),
        f"Noise: {s.noise.generator}. {s.noise.grid}.",
    ]
    if s.steps is not None:
        how = "all users at each step, nothing is sampled"
        if s.steps.sampler == "poisson":
            how = f"Poisson batches of {s.steps.expected_batch_size} expected (rate {s.steps.sampling_rate:.4g})"
        lines.append(
            f"Steps: {s.steps.charged} of {s.steps.planned}, {how}, noise multiplier {s.steps.noise_multiplier:.4g}."
        )
    lines += [f"Answer {r.name}: share {r.share:.3g}, noise multiplier {r.noise_multiplier:.4g}." for r in s.releases]
    lines.append(f"Trained on: {s.data.trained_on}.")
    lines.append(f"Assumed public: {'; '.join(s.assumed_public)}.")
    lines += [f"Assumption: {what}." for what in s.assumptions]
    how = _TUNING[s.tuning.kind].format(
        trials=s.tuning.mean_trials,
        distribution=s.tuning.distribution,
        count=len(s.tuning.configurations),
        tried="; ".join(s.tuning.configurations),
    )
    lines.append(f"Tuning: {how}.")
    lines += [f"Not covered: {item}." for item in s.not_covered]
    return "\n".join(lines)


def _together(part: AccountPart, alone: AlonePart | None) -> str:
    earlier = part.runs - 1
    others = f"{earlier} earlier run{'s' if earlier > 1 else ''}" if earlier else "no other run so far"
    cap = f"The cap is epsilon {part.cap:g}"
    if part.period:
        cap = (
            f"The cap is epsilon {part.cap:g} per calendar year, and {part.period} has spent "
            f"{_bound(part.epsilon_in_period)}; years add up, and the pair above is for all years"
        )
    others += f" charged to account {part.id[:8]}"
    if alone is not None:
        counts = (
            f"The model also uses what earlier runs released, so the pair is of this run and {others}. This run alone: "
        )
        return f"{counts}{_pair(alone)}. {cap}. Later runs add to it."
    return f"Epsilon is of this run alone. Together with {others}: {_pair(part)}. {cap}. Later runs add to it."


def _pair(part: AccountPart | AlonePart | PrivacyStatement) -> str:
    return f"({_bound(part.epsilon)}, {round_up(part.delta, 6):g})"


def _bound(value: float | str) -> str:
    """An upper bound with four digits, rounded up."""
    return value if isinstance(value, str) else f"{round_up(value, 4):.4g}"


def round_up(value: float, digits: int) -> float:
    """The smallest number of so many digits that is not below `value`.

    >>> round_up(7.99912, 4), round_up(8.0, 4), round_up(0.25449, 3)
    (8.0, 8.0, 0.255)
    """
    if value <= 0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    steps = value / unit
    return (round(steps) if math.isclose(steps, round(steps), rel_tol=1e-9) else math.ceil(steps)) * unit
