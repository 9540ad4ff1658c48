"""Transformers on people's sequences with user-level differential privacy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` imports
    from dpformer.artifact import load as load_model
    from dpformer.clipping import PhantomClipping, TiedCrossEntropy
    from dpformer.data import prepare_named
    from dpformer.data.prepare import prepare
    from dpformer.estimator import DPFormer
    from dpformer.training import PrivateTraining

__version__ = "0.1.0.dev0"

# Name to module (and name there, where it differs), imported when first asked for: `import dpformer` stays light.
_EXPORTS = {
    "DPFormer": "dpformer.estimator",
    "PhantomClipping": "dpformer.clipping",
    "PrivateTraining": "dpformer.training",
    "TiedCrossEntropy": "dpformer.clipping",
    "load_model": "dpformer.artifact:load",
    "prepare": "dpformer.data",
    "prepare_named": "dpformer.data",
}
__all__ = [
    "DPFormer",
    "PhantomClipping",
    "PrivateTraining",
    "TiedCrossEntropy",
    "load_model",
    "prepare",
    "prepare_named",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module, _, inner = _EXPORTS[name].partition(":")
        return getattr(import_module(module), inner or name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
