"""All that `dpformer plan` tells, as JSON-ready figures."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import Epsilon, epsilon
from dpformer.privacy.attack_bounds import attack_bound
from dpformer.privacy.calibration import coarse_calibrate, gaussian_multiplier, poisson_guess
from dpformer.privacy.charge import Charge
from dpformer.privacy.plan import PrivacyPlan, steps_of
from dpformer.privacy.tuning import Tuning, tuned_epsilon, tuned_factor

EPSILONS = (1.0, 3.0, 5.0, 8.0, 10.0)
# Items, tokens a user, width, blocks.
Shape = tuple[int, float, int, int]


def read_counts(folder: Path) -> dict[str, float]:
    """users, items, events of a folder made by `dpformer prepare`."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        counts = manifest["counts"]
        return {name: counts[name] for name in ("users", "items", "events")}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise PrivacyError(
            f"{folder}: holds no prepared data (no sound manifest.json); run dpformer prepare, or give --users instead"
        ) from problem


def tenths(plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Epsilon after each tenth of the training."""
    rows = []
    for step in sorted({math.ceil(plan.steps * tenth / 10) for tenth in range(11)}):
        spent = plan.epsilon_after(step)
        rows.append({"step": step, "epsilon": spent.epsilon, "rdp": spent.rdp, "accountant": spent.accountant})
    return rows


def batch_sizes(plan: PrivacyPlan) -> list[int]:
    """The plan's batch size, half, twice and four times it, and the full batch."""
    sizes = {plan.batch_size // 2, plan.batch_size, 2 * plan.batch_size, 4 * plan.batch_size}
    return sorted(size for size in {*sizes, plan.users} if 1 <= size <= plan.users)


def table(plan: PrivacyPlan, epochs: float) -> list[dict[str, Any]]:
    """Noise and signal for other budgets and batch sizes, in as many epochs, with the whole budget for the steps.

    Calibrated on a coarse grid: never too little noise, about 0.2 % too much.
    """
    rows = []
    for target in EPSILONS:
        sigma_1 = gaussian_multiplier(target, plan.delta)
        for size in batch_sizes(plan):
            steps, rate = steps_of(epochs, plan.users, size), size / plan.users
            if rate == 1:
                sigma = sigma_1 * math.sqrt(steps)
            else:
                sigma = coarse_calibrate(
                    lambda s, rate=rate, steps=steps: (Charge("steps", s, rate, steps),),  # type: ignore[misc]
                    target,
                    plan.delta,
                    poisson_guess(sigma_1, rate, steps),
                )
            share = math.sqrt(steps) * size / sigma / (plan.users / sigma_1)
            rows.append(
                {
                    "epsilon": target,
                    "batch_size": size,
                    "steps": steps,
                    "noise_multiplier": sigma,
                    "share_of_cap": share,
                }
            )
    return rows


def tuning_offer(plan: PrivacyPlan, trials: float) -> dict[str, Any] | None:
    """What choosing the best of a random number of trials costs, and the noise within the budget (or None)."""
    if not plan.private or not plan.steps:
        return None
    tuning = Tuning(trials)
    try:
        factor = tuned_factor(plan.charges(), tuning, plan.epsilon, plan.delta)
        within: float | None = plan.noise_multiplier * factor
    except PrivacyError:
        within = None
    return {
        "mean_trials": trials,
        "distribution": tuning.distribution,
        "score_noise_multiplier": tuning.score_noise_multiplier,
        "epsilon_with_this_noise": tuned_epsilon(plan.charges(), tuning, plan.delta),
        "noise_multiplier_within_budget": within,
        "accountant": "rdp",
    }


def estimate(plan: PrivacyPlan, shape: Shape) -> dict[str, Any]:
    """Time and memory of the steps, from a micro-batch timed on this machine."""
    from dpformer.fit import estimate
    from dpformer.fit.recipe import NetworkSettings

    items, mean, dim, blocks = shape
    length = max(1, round(mean))
    network = NetworkSettings.model_validate({"d": dim, "blocks": blocks, "max_length": length})
    cost = estimate.estimate(network, items, plan.batch_size, length)
    return {
        "assumes": f"{length:,} tokens a user, d = {dim}, {blocks} blocks, {items:,} items learned",
        **asdict(cost),
        "training_seconds": cost.seconds * plan.steps,
    }


def report(
    plan: PrivacyPlan,
    epochs: float | None,
    trials: float,
    with_table: bool,
    shape: Shape | None,
) -> dict[str, Any]:
    """Everything, in the order in which it is shown; infinities are written as "inf"."""
    epochs = plan.steps * plan.rate if epochs is None else epochs
    attack = attack_bound(plan.charges(), plan.delta)
    figures = {
        "users": plan.users,
        "batch_size": plan.batch_size,
        "sampler": plan.sampler,
        "sampling_rate": plan.rate,
        "steps": plan.steps,
        "epochs": epochs,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "releases": [asdict(release) for release in plan.releases],
        "spent": _figures(plan.total),
        "epsilon_at_delta_1_over_users": epsilon(plan.charges(), 1 / plan.users).epsilon,
        "tenths": tenths(plan),
        "signal_to_noise": plan.signal_to_noise,
        "signal_cap": plan.signal_cap,
        "attack": {**asdict(attack), "reading": attack.sentence()},
        "estimate": estimate(plan, shape) if shape and plan.steps else None,
        "table": table(plan, epochs) if with_table and plan.steps else None,
        "tuning": tuning_offer(plan, trials),
    }
    return _finite(figures)


def _figures(spent: Epsilon) -> dict[str, Any]:
    return {key: value for key, value in asdict(spent).items() if key != "delta"}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
