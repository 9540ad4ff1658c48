"""State of optimisers and schedulers as tensors and JSON: no pickle."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from dpformer.errors import DPFormerError


def pack_state(prefix: str, state: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A nested state as JSON; its tensors are put into `tensors` under names that begin with `prefix`.

    >>> packed = pack_state("a", {"state": {0: (1.5, None)}}, {})
    >>> packed["leaves"], unpack_state("a", packed, {})
    ([1.5, None], {'state': {0: (1.5, None)}})
    """
    leaves, form = tree_flatten(state)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors[f"{prefix}.{k}"], leaves[k] = leaf.detach().clone(), None
        elif not (leaf is None or isinstance(leaf, (bool, int, float, str))):
            raise DPFormerError(
                f"the state of the {prefix} holds a {type(leaf).__name__}, which no checkpoint can keep; choose another {prefix}"
            )
    return {"form": treespec_dumps(form), "leaves": leaves}


def unpack_state(prefix: str, packed: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """What `pack_state` packed."""
    leaves = [tensors.get(f"{prefix}.{k}", leaf) for k, leaf in enumerate(packed["leaves"])]
    return tree_unflatten(leaves, treespec_loads(packed["form"]))
