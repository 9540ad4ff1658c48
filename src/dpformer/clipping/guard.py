"""Check that samples do not mix, and that no gradient passes by the recorder.

Per-sample gradients are read off the gradient at the output of a use: which part of it belongs to which sample?
`locate` proves it on the autograd graph of the losses, from what is known of each function on the way (`kinds.py`). Where a
function is not known, `WeightedPass` checks the batch on the gradients themselves, by a second backward pass. The first batch is
checked in any case. What carries no gradient (masks, ids, the data) is not in the graph, and costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction

from dpformer.clipping.axis import MIXED, Axis, Layout
from dpformer.clipping.kinds import Inner, kind_of
from dpformer.errors import ClippingError

if TYPE_CHECKING:
    from dpformer.clipping.recorder import Recorder
    from dpformer.clipping.use import Use

# Different weights in a `WeightedPass`; two samples with the same weight are not distinguished.
POWERS = 24


# What these return is data, or a sample's own random numbers, though no tensor goes in.
_GIVES_DATA = """
    tensor as_tensor asarray from_numpy frombuffer new_tensor rand randn randint randperm rand_like randn_like randint_like
    normal normal_ bernoulli bernoulli_ multinomial poisson uniform_ exponential_ random_
"""


class Shared:
    """The tensors of one forward pass that are sure to be the same for all samples. They are kept alive: identities stay theirs.

    These are buffers, frozen parameters, whatever is made from sizes alone, and what is made of these. `is_constant` leaves out
    what is made of numbers that may be data.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors: dict[int, tuple[Tensor, bool]] = {id(tensor): (tensor, True) for tensor in tensors}
        memory = (tensor.untyped_storage().data_ptr() for tensor, _ in self._tensors.values() if tensor.numel())
        self._memory = set(memory)  # `nn.Parameter(frozen.T)` is not seen as a call

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tensors

    def is_constant(self, tensor: Tensor) -> bool:
        """Is it no data? A single number is a constant: it can hold nothing of one sample that others do not have."""
        if not tensor.dim() or (entry := self._tensors.get(id(tensor))) is None:
            return not tensor.dim() or (tensor.is_leaf and tensor.untyped_storage().data_ptr() in self._memory)
        return entry[1]

    def add(self, tensor: Tensor) -> None:
        """Take note of a tensor that is the same for all samples."""
        self._tensors[id(tensor)] = tensor, True

    def note(self, function: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], out: Any) -> None:
        """Take note of a call that has no parameter in it; tensors are all tensors among its arguments."""
        if function is F.batch_norm and (args[5] if len(args) > 5 else kwargs.get("training", False)):
            raise ClippingError(
                "batch_norm in training mode mixes samples: use layer norm, or evaluation mode with fixed statistics"
            )
        constant = getattr(function, "__name__", "") not in _GIVES_DATA.split()
        for t in tensors:
            if id(t) not in self._tensors and not self.is_constant(t):
                return
            constant = constant and self.is_constant(t)
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self._tensors[id(t)] = t, constant


def check_graph(recorder: Recorder, losses: Tensor) -> dict[Any, int]:
    """Raise if any leaf other than the recorder's anchor can receive a gradient from `losses`.

    Returns the nodes of the graph and the number of edges that lead to each.
    """
    if losses.grad_fn is None:
        raise ClippingError(
            "the losses are a parameter or a tensor that was made outside: compute them from the model's output"
        )
    users: Counter[Any] = Counter([losses.grad_fn])
    stack = [losses.grad_fn]
    while stack:
        node = stack.pop()
        assert node is not None
        for following, _ in node.next_functions:
            if following is None:
                continue
            users[following] += 1
            if users[following] > 1:
                continue
            if getattr(following, "_forward_cls", None) is CheckpointFunction:
                raise ClippingError(
                    "torch.utils.checkpoint with use_reentrant=True differentiates by itself, past the recorder: give it "
                    "use_reentrant=False (gradient_checkpointing_kwargs={'use_reentrant': False} in Hugging Face models)"
                )
            leaf = getattr(following, "variable", None)
            if leaf is None:
                stack.append(following)
            elif leaf is not recorder.anchor:
                raise _passed_by(recorder, leaf, node)
    return users


def _passed_by(recorder: Recorder, leaf: Tensor, node: Any) -> ClippingError:
    """The error for a leaf that would get a gradient by another way than a use."""
    user, view = node.name(), recorder.view(leaf)
    if view is None:
        return ClippingError(
            f"a tensor of shape {tuple(leaf.shape)} that requires a gradient reaches the loss through {user} and is "
            "no parameter of the module: give PhantomClipping the module that holds it, or detach it"
        )
    if hasattr(node, "_forward_cls"):
        why = "a custom autograd.Function: write it with torch functions, or give it a rule (register_rule)"
    else:
        why = "which the recorder does not see (scripted or traced code, an extension): use the layer's Python code"
    return ClippingError(f"parameter {view.name!r} reaches the loss through {user}, {why}")


@dataclass(frozen=True)
class Doubt:
    """Why samples are not sure to be apart: `function` is not known, or is sure to mix them."""

    function: str
    mixes: bool


def locate(recorder: Recorder, losses: Tensor, users: dict[Any, int]) -> Doubt | None:
    """Find where the samples lie in the output of every use; the doubt, if samples are not sure to be apart.

    Raises if they are sure not to be.
    """
    batch, first = len(losses), None
    if batch == 1:
        for use in recorder.uses:
            use.layout = Layout(1)
        return None
    for node, (axis, doubt) in _walk(losses, users).items():
        use = node.use
        if doubt is not None and doubt.mixes:
            raise _mixture(use, f" through {doubt.function}")
        dim = axis.place(use.shape) if axis else None
        if axis and dim is not None:
            regular = len(axis.owners) == batch and bool((axis.owners == torch.arange(batch)).all())
            before = use.shape[dim:].numel() // (batch * axis.inner) if regular else 1
            use.layout = Layout(batch, dim, before, None if regular else axis.owners_along(use.shape, dim))
        elif use.shape and use.shape[0] % batch == 0:
            use.layout = Layout(batch)
            doubt = doubt or Doubt(use.called, mixes=False)  # a guess, if samples lie across two dimensions
        else:
            raise ClippingError(
                f"{use.called} uses {use.names} in a result of shape {tuple(use.shape)} that does not "
                f"hold the {batch} samples: keep samples first, and padded rather than packed by a mask"
            )
        first = first or doubt
    return first


def _walk(losses: Tensor, users: dict[Any, int]) -> dict[Any, tuple[Inner, Doubt | None]]:
    """The axis of samples of every recorded use, and the doubt about it, if there is one: back from the losses.

    users: the nodes of the graph and how many edges lead to each. After a function that is not known samples are taken to be
    first. What has no elements has no part in it.
    """
    samples, ends, waiting = torch.arange(len(losses)), {}, dict(users)
    assert losses.grad_fn is not None
    arrived: dict[Any, dict[int, tuple[Inner, Doubt | None]]] = {node: {} for node in users}  # by node and output
    arrived[losses.grad_fn][losses.output_nr] = Axis(1, samples), None
    ready: list[Any] = [losses.grad_fn]
    while ready:
        node = ready.pop()
        shapes = [None if n is None else tuple(n._input_metadata[k].shape) for n, k in node.next_functions]
        results: list[tuple[list[Inner], Doubt | None]] = []
        for output, (axis, doubt) in arrived.pop(node).items():
            axis, kind = axis.regular(samples) if axis else None, kind_of(node)
            if hasattr(node, "use"):
                ends[node] = axis, doubt
                results.append(([axis, None, None], doubt))
            elif kind is None or axis is None:
                results.append(([None] * len(shapes), doubt))
            else:
                results.append((kind(node, tuple(node._input_metadata[output].shape), axis, shapes), doubt))
        for k, (following, output) in enumerate(node.next_functions):
            shape = shapes[k]
            if following is None or (hasattr(node, "use") and k):
                continue
            if results and shape is not None and 0 not in shape:
                axis = functools.reduce(_join, (axes[k] for axes, _ in results))
                doubt = next((doubt for _, doubt in results if doubt is not None), None)
                if not axis or axis is MIXED:
                    doubt = doubt or Doubt(node.name(), mixes=axis is MIXED)
                    whole = shape and shape[0] % len(samples) == 0
                    axis = Axis(math.prod(shape) // len(samples), samples) if whole else None
                if output in arrived[following]:
                    before, earlier = arrived[following][output]
                    joined = _join(before, axis)
                    if joined is None and (before or axis):
                        doubt = doubt or Doubt(node.name(), mixes=False)
                    axis, doubt = joined or before, earlier or doubt
                arrived[following][output] = axis, doubt
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    return ends


def _join(a: Inner, b: Inner) -> Inner:
    return a if a is b else a.join(b) if a and b else None


def _mixture(use: Use, how: str) -> ClippingError:
    return ClippingError(
        f"the loss of one sample depends on another at {use.called} with {use.names}{how}: samples must be the same "
        "dimension everywhere, and nothing (batch norm, in-batch negatives, a mean over the batch) may mix them"
    )


class WeightedPass:
    """A backward pass with random weights w on the losses, to be compared with the one without, which comes after it.

    Backward is linear, so the gradient at sample i's part of a use must be w_i times the one without. A batch norm, in-batch
    negatives or a batch dimension in another place make it a mixture. The weights are powers of two: multiplying by them commutes
    with rounding, so that the comparison can be sharp. exact: compare all numbers. Else, where the graph has proved the samples
    to be apart, sums along the last dimension with random signs: so no second gradient of all uses is in memory.
    """

    def __init__(self, recorder: Recorder, losses: Tensor, exact: bool) -> None:
        generator = torch.Generator()  # of its own, so that the model's random numbers are those of an unchecked pass
        self._exact, self._seed = exact, generator.seed()
        powers = torch.randperm(len(losses), generator=generator) % POWERS  # all different in a small batch
        self._weights = torch.pow(2.0, powers).to(losses)
        self._mixed: dict[int, Tensor] = {}
        for use in recorder.uses:
            use.take = partial(self._note, use)
        try:
            recorder.backward((losses * self._weights).sum(), retain_graph=True)
        finally:
            for use in recorder.uses:
                use.take = None

    def _note(self, use: Use, gradient: Tensor) -> None:
        self._mixed[id(use)] = self._numbers(use, gradient)[0] if gradient.numel() else gradient

    def _numbers(self, use: Use, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What is compared, `[B, n]`, and how large it is, `[B]`."""
        assert use.layout is not None
        own = use.layout.first(gradient).reshape(len(self._weights), -1)
        width = gradient.shape[-1] if gradient.dim() > 1 else 1
        if self._exact or width == 1:
            return own, torch.nan_to_num(own, 0.0, 0.0, 0.0).abs().amax(1)
        coins = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(self._seed))
        sums = own.view(len(own), -1, width) @ (2 * coins - 1).to(own)
        return sums, torch.linalg.vector_norm(own, dim=1)

    def compare(self, uses: list[Use]) -> None:
        """Raise if the gradient at sample i's part of a use comes from another sample's loss."""
        if {id(use) for use in uses} != self._mixed.keys():
            raise ClippingError("a weighted backward pass reached other uses of parameters than the one after it")
        for use in uses:
            assert use.gradient is not None
            if not use.gradient.numel():
                continue
            plain, size = self._numbers(use, use.gradient)
            w, limits = self._weights.to(plain), torch.finfo(plain.dtype)
            off = torch.nan_to_num(self._mixed.pop(id(use)) - plain * w[:, None], 0.0, 0.0, 0.0).abs()
            # Below `tiny` numbers have fewer bits, and multiplying by a power of two does round: saturated attention gets there.
            small = limits.tiny * (1 if self._exact else use.gradient.shape[-1])
            if bool((off > ((100 * limits.eps * size + small) * w)[:, None]).any()):
                raise _mixture(use, "")
