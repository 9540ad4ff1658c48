"""The guarantee: mechanisms, accounting, calibration, Curator, noise, ledger, statement.

Names are looked up when they are first used, so that importing this package is quick.
"""

import importlib
from typing import Any

_EXPORTS = {
    "AttackBound": "attack_bounds",
    "Account": "ledger",
    "Answer": "query",
    "Charge": "charge",
    "Asker": "query",
    "Circumstances": "statement",
    "Curator": "curator",
    "DataPart": "statement",
    "GRADIENTS": "plan",
    "Keys": "keys",
    "Query": "query",
    "Sample": "query",
    "Statistic": "query",
    "Epsilon": "accounting",
    "Ledger": "ledger",
    "Position": "chain",
    "PrivacyPlan": "plan",
    "PrivacyStatement": "statement",
    "Tuning": "tuning",
    "TuningPart": "statement",
    "attack_bound": "attack_bounds",
    "build_statement": "statement",
    "calibrate": "calibration",
    "create_ledger": "ledger",
    "epsilon": "accounting",
    "gaussian_multiplier": "calibration",
    "json_schema": "statement",
    "make_plan": "plan",
    "open_ledger": "ledger",
    "parse_statement": "statement",
    "read_ledger": "ledger",
    "spending": "plan",
    "split_budget": "charge",
    "step_multiplier": "calibration",
    "tuned_epsilon": "tuning",
    "tuned_factor": "tuning",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"dpformer.privacy.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
