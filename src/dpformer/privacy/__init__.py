"""The guarantee, for any data about people: plan, Curator, ledger, accounting, statement.

A name is imported when it is first used, so that `import dpformer.privacy` is quick.
"""

import importlib
from typing import Any

_EXPORTS = {
    "accounting": ("Charge", "epsilon"),
    "attack_bounds": ("attack_bound",),
    "curator": ("Curator",),
    "keys": ("Keys",),
    "ledger": ("create_ledger", "read_ledger"),
    "plan": ("PrivacyPlan", "make_plan"),
    "query": ("Answer", "Query", "Sample", "Statistic"),
    "statement": ("PrivacyStatement", "parse_statement"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"dpformer.privacy.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
