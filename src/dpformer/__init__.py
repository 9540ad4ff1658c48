"""Transformers on people's sequences with user-level differential privacy."""

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

# What `from dpformer import ...` offers, and where it lives; imported when first asked for, so that the command line
# starts quickly.
_EXPORTS = {
    "PhantomClipping": "dpformer.clipping",
    "TiedCrossEntropy": "dpformer.clipping",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dpformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]
