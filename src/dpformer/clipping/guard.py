"""Check that samples do not mix, and that no gradient passes by the recorder.

The first dimension of every use of a parameter must hold the samples, in order:
per-sample gradients are read off it. Most functions keep it. `check_apart` checks it on the gradients
themselves, by a second backward pass: the first time a structure of uses is seen, every time a function of the forward pass may
have reordered samples (`Samples` notes these), and at random.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.errors import ClippingError

if TYPE_CHECKING:
    from dpformer.clipping.recorder import Recorder, Use

# A batch of a structure that has passed is checked again with probability 1 / CHECK_EVERY.
CHECK_EVERY = 100
# Different weights in `check_apart`; two samples with the same weight are not distinguished.
POWERS = 24
_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten}
_ITEMS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_REORDERING = (
    *("index_select", "gather", "take_along_dim", "take", "masked_select", "nonzero", "argwhere", "where", "flip"),
    *("roll", "sort", "argsort", "topk", "unique", "repeat_interleave", "index_add", "index_copy", "index_put"),
    *("scatter", "scatter_add", "masked_scatter", "index_add_", "index_copy_", "index_put_", "scatter_"),
    "scatter_add_",
)
_REORDERS = {getattr(place, n) for place in (torch, torch.Tensor) for n in _REORDERING if hasattr(place, n)}


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
        """Whether a tensor is sure to be the same for all samples."""
        return id(tensor) in self._shared

    def merged(self, tensor: Tensor) -> int | None:
        """The first dimension of the tensor that this one is a flattening of, if it was seen to be one."""
        return self._merged.get(id(tensor), (None,))[0]

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


def check_used(recorder: Recorder) -> None:
    """Raise if a trainable parameter has no use."""
    used = {id(view.parameter) for use in recorder.uses for view in use.views}
    if unused := [name for name, p in recorder.trainable if id(p) not in used]:
        raise ClippingError(
            f"parameter {unused[0]!r} requires a gradient and is not used in the forward pass"
            + (f" (and {len(unused) - 1} more)" if len(unused) > 1 else "")
            + ": freeze it with requires_grad_(False), or use it"
        )


def check_graph(recorder: Recorder, losses: Tensor) -> None:
    """Raise if any leaf other than the recorder's anchor can receive a gradient from `losses`."""
    seen: set[Any] = set()
    stack = [(losses.grad_fn, "the loss")]
    while stack:
        node, user = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not recorder.anchor:
            if (view := recorder.view(leaf)) is not None:
                raise recorder.refuse(user, view, "was not seen by the recorder")
            raise ClippingError(
                f"a tensor of shape {tuple(leaf.shape)} that requires a gradient reaches the loss through {user} and is "
                "no parameter of the module: give PhantomClipping the module that holds it, or detach it"
            )
        stack.extend((following, node.name()) for following, _ in node.next_functions)


def structure_of(module: nn.Module, uses: list[Use]) -> tuple[Any, ...]:
    """What two forward passes have in common if checking one of them is enough."""
    modes = tuple(part.training for part in module.modules())
    return (modes, *((use.called, use.names, len(use.shape)) for use in uses))


def is_unclear(recorder: Recorder, batch: int) -> bool:
    """Whether a batch has to be checked though its structure has passed before."""
    evident = all(use.superseded or batch in (*use.shape[:1], use.merged) for use in recorder.uses)
    # At random too: to find what the notes on the forward pass do not show.
    return not evident or recorder.samples.reordered or secrets.randbelow(CHECK_EVERY) == 0


def check_first(uses: list[Use], batch: int) -> None:
    """Raise if the first dimension of a use cannot hold the samples."""
    for use in uses:
        if not use.shape or use.shape[0] % batch:
            raise ClippingError(
                f"{use.called} uses {use.names} in a result of shape {tuple(use.shape)} whose first dimension does not "
                f"hold the {batch} samples: keep samples first, and padded rather than packed by a mask"
            )


def check_apart(recorder: Recorder, losses: Tensor) -> bool:
    """Raise if the gradient at sample i's part of a use comes from another sample's loss; True if that is now sure.

    Backward is linear, so with random weights w on the losses the gradient at sample i's part must be w_i times the one without.
    A batch norm, in-batch negatives or a batch dimension in another place make it a mixture. The weights are powers of two:
    multiplying by them commutes with rounding, so that the comparison can be sharp.
    """
    generator = torch.Generator()  # of its own, so that the model's random numbers are those of an unchecked pass
    generator.seed()
    powers = torch.randperm(len(losses), generator=generator) % POWERS  # all different in a small batch
    weights = torch.pow(2.0, powers).to(losses)
    sure: list[bool] = []
    for use in recorder.uses:
        # Compared where it comes up, so that no second gradient of all uses is in memory.
        use.take = partial(_compare, use, weights, sure)
    try:
        torch.autograd.grad((losses * weights).sum(), recorder.anchor, allow_unused=True)
    finally:
        for use in recorder.uses:
            use.take = None
    if len(sure) != len(recorder.uses):
        raise ClippingError("a weighted backward pass reached other uses of parameters than the one before it")
    return all(sure)


def _compare(use: Use, weights: Tensor, sure: list[bool], mixed: Tensor) -> None:
    """Note whether a use shows that its samples are apart; raise if they are not.

    A use that had no gradient in two samples of different weight (a gate that starts at zero, say) shows nothing, and is looked
    at again next time.
    """
    assert use.gradient is not None
    if not mixed.numel():
        sure.append(True)
        return
    plain, mixed = use.gradient.reshape(len(weights), -1), mixed.reshape(len(weights), -1)
    w = weights[:, None].to(plain)
    off = torch.nan_to_num(mixed - plain * w, 0.0, 0.0, 0.0).abs().amax(1)
    size = torch.nan_to_num(plain * w, 0.0, 0.0, 0.0).abs().amax(1)
    # Below `tiny` numbers have fewer bits, and multiplying by a power of two does round: saturated attention gets there.
    limits = torch.finfo(plain.dtype)
    if bool((off > 100 * limits.eps * size + limits.tiny * w[:, 0]).any()):
        raise ClippingError(
            f"the loss of one sample depends on another at {use.called} with {use.names}: samples must be the first "
            "dimension everywhere, and nothing (batch norm, in-batch negatives) may mix them"
        )
    sure.append(len(weights[size > 0].unique()) > 1)
