"""State of optimisers and schedulers as tensors and JSON: no pickle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpformer.errors import DPFormerError


def pack_state(prefix: str, state: Any, tensors: dict[str, Tensor]) -> Any:
    """A nested state as JSON; its tensors are put into `tensors` under names that begin with `prefix`.

    >>> tensors = {}
    >>> pack_state("a", {"state": {0: (1.5, None)}}, tensors)
    {'dict': [['state', {'dict': [[0, {'tuple': [1.5, None]}]]}]]}
    """
    if isinstance(state, Tensor):
        name = f"{prefix}.{sum(one.startswith(f'{prefix}.') for one in tensors)}"
        tensors[name] = state.detach().clone()
        return {"tensor": name}
    if isinstance(state, dict):
        return {"dict": [[_plain(prefix, key), pack_state(prefix, value, tensors)] for key, value in state.items()]}
    if isinstance(state, (list, tuple)):
        return {type(state).__name__: [pack_state(prefix, value, tensors) for value in state]}
    return _plain(prefix, state)


def unpack_state(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """What `pack_state` packed.

    >>> unpack_state({'dict': [['state', {'dict': [[0, {'tuple': [1.5, None]}]]}]]}, {})
    {'state': {0: (1.5, None)}}
    """
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: unpack_state(one, tensors) for key, one in value}
    parts = [unpack_state(one, tensors) for one in value]
    return tuple(parts) if kind == "tuple" else parts


def _plain(prefix: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise DPFormerError(
        f"the state of the {prefix} holds a {type(value).__name__}, which no checkpoint can keep; choose another {prefix}"
    )
