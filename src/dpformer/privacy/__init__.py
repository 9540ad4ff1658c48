"""The guarantee: mechanisms, accounting, calibration, noise, ledger, statement, DP frequencies.

Names are looked up when they are first used, so that importing this package is quick.
"""

import importlib
from typing import Any

_EXPORTS = {
    "AttackBound": "tradeoff",
    "Account": "ledger",
    "Epsilon": "accounting",
    "FullBatchSteps": "mechanisms",
    "GaussianRelease": "mechanisms",
    "ItemFrequencies": "frequencies",
    "Ledger": "ledger",
    "NoiseSource": "noise",
    "PoissonSteps": "mechanisms",
    "Position": "chain",
    "PrivacyPlan": "plan",
    "PrivacyStatement": "statement",
    "StepAudit": "audit",
    "Tuning": "tuning",
    "TuningPart": "statement",
    "assume_public": "frequencies",
    "attack_bound": "tradeoff",
    "audit_step": "audit",
    "build_statement": "statement",
    "calibrate": "calibration",
    "create_ledger": "ledger",
    "epsilon": "accounting",
    "fingerprint": "ledger",
    "gaussian_multiplier": "calibration",
    "json_schema": "statement",
    "make_plan": "plan",
    "noise_source": "noise",
    "noisy_histogram": "frequencies",
    "open_ledger": "ledger",
    "take_lock": "chain",
    "parse_statement": "statement",
    "public_frequencies": "frequencies",
    "read_ledger": "ledger",
    "spending": "plan",
    "split_releases": "mechanisms",
    "step_multiplier": "calibration",
    "tuned_epsilon": "tuning",
    "tuned_multiplier": "tuning",
    "tuned_release_multiplier": "tuning",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"dpformer.privacy.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
