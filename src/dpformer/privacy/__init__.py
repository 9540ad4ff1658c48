"""The guarantee, for any data about people: plan, Curator, ledger, accounting, statement.

A name is imported when it is first used, so that `import dpformer.privacy` is quick.
"""

import importlib
from typing import Any

_EXPORTS = {
    "Answer": "query",
    "Charge": "accounting",
    "Curator": "curator",
    "Keys": "keys",
    "PrivacyPlan": "plan",
    "PrivacyStatement": "statement",
    "Query": "query",
    "Sample": "query",
    "Statistic": "query",
    "attack_bound": "attack_bounds",
    "create_ledger": "ledger",
    "epsilon": "accounting",
    "make_plan": "plan",
    "parse_statement": "statement",
    "read_ledger": "ledger",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"dpformer.privacy.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
