"""Where the samples are: what the functions of a forward pass tell about the first dimension of tensors.

Per-sample gradients are read off the first dimension, so it has to hold the samples, in order, wherever a parameter is used.
Most functions keep that, and `PhantomClipping` checks it on the gradients themselves the first time it sees a structure of uses.
A function noted here as one that may reorder makes it check again, every time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.errors import ClippingError

_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten}
_ITEMS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_REORDERS = {
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in (
        *(
            "index_select",
            "gather",
            "take_along_dim",
            "take",
            "masked_select",
            "nonzero",
            "argwhere",
            "where",
            "flip",
            "roll",
        ),
        *("sort", "argsort", "topk", "unique", "repeat_interleave", "index_add", "index_copy", "index_put", "scatter"),
        *("scatter_add", "index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_", "masked_scatter"),
    )
    if hasattr(place, name)
}


class Samples:
    """Notes on the tensors of one forward pass. They are kept alive, so that their identities stay theirs."""

    def __init__(self, shared: Iterable[Tensor]) -> None:
        # Whether some function may have put samples in another order.
        self.reordered = False
        # The same for all samples: buffers, frozen parameters, whatever is made from sizes alone, and of these.
        self._shared: dict[int, Tensor] = {id(tensor): tensor for tensor in shared}
        # Tensors that are others with their first dimensions merged, and the first dimension those had.
        self._merged: dict[int, tuple[int, Tensor]] = {}

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to be the same for all samples."""
        return id(tensor) in self._shared

    def merged(self, tensor: Tensor) -> int | None:
        """The first dimension of the tensor that this one is a flattening of, if it was seen to be one."""
        found = self._merged.get(id(tensor))
        return None if found is None else found[0]

    def note(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any
    ) -> None:
        """Take note of a call that has no parameter in it; tensors are all tensors among its arguments."""
        for t in tensors:
            if id(t) not in self._shared:
                break
        else:
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor):
                    self._shared[id(t)] = t
            return
        if function in _RESHAPES:
            before, joined = tensors[0], tensors[0].dim() - out.dim() + 1
            if joined > 1 and out.shape[1:] == before.shape[joined:]:
                self._merged[id(out)] = before.shape[0], out
        elif function is F.batch_norm:
            if args[5] if len(args) > 5 else kwargs.get("training", False):
                raise ClippingError(
                    "batch_norm in training mode mixes samples: use layer norm, or evaluation mode with fixed statistics"
                )
        elif function in _ITEMS:
            # A table that is the same for all may be read by anything.
            self.reordered |= not self.is_shared(tensors[0]) and _touches_first(args[1])
        elif function in _REORDERS:
            self.reordered |= not (function is torch.where and len(args) + len(kwargs) > 1)


def _touches_first(key: Any) -> bool:
    first = (key[0] if key else slice(None)) if isinstance(key, tuple) else key
    return not (first is None or first is Ellipsis or first == slice(None)) if not isinstance(first, Tensor) else True
