"""One use of parameters: the gradient at the output of a recorded function, and how it becomes the parameters' gradients."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.algebra import Dense, Form
from dpformer.clipping.axis import Layout
from dpformer.clipping.gradient import Route, shorten
from dpformer.clipping.registry import name_of
from dpformer.clipping.views import View
from dpformer.errors import ClippingError

# What a use adds: one or more forms for each view used (`Any`: a `tied.Head` too).
Forms = Iterable[tuple[View, Form | Any]]
# From the gradient at a use's output, where samples lie, and the tensors saved to its forms. It runs under `torch.no_grad`.
Derive = Callable[..., Forms]


@dataclass
class Use:
    """One call of `function` with one or more parameters; `gradient` is the one at its output, after the backward pass.

    saved: the tensors that `derive` reads, with their versions. Until the backward pass autograd keeps them (`given`): so it
    finds changes in place, and checkpointing can compute them again. layout: where the samples lie in `shape` (`guard.locate`);
    take: while set, it receives the gradient, which is then not kept; derived: the forms, once `settle` has derived them.
    replayed: in a checkpoint, the keys of all tensors that rules saved when it was computed again.
    """

    function: Any
    views: tuple[View, ...]
    derive: Derive
    shape: torch.Size
    given: tuple[Tensor, ...]
    raw: bool = False
    replayed: set[tuple[int, Any, int]] | None = None
    saved: tuple[tuple[Tensor, int], ...] = ()
    layout: Layout | None = None
    gradient: Tensor | None = field(default=None, repr=False)
    take: Callable[[Tensor], None] | None = field(default=None, repr=False)
    derived: list[tuple[View, Any]] | None = field(default=None, repr=False)

    def settle(self, route: Route | None, gradient: Tensor) -> None:
        """Derive and shorten the forms while the gradient is in the cache, and free it and what else they were made from."""
        self.gradient = gradient
        forms = list(self.forms())
        # Several forms of one parameter have terms with one another too.
        times = Counter(id(view.parameter) for view, _ in forms)
        self.derived = [(v, shorten(v.parameter, f, route) if times[id(v.parameter)] == 1 else f) for v, f in forms]
        self.gradient = None
        del self.derive  # and what it refers to
        if all(isinstance(form, Dense) for _, form in self.derived):
            self.saved = ()  # else they are read once more

    def forms(self) -> Forms:
        """What this use adds to each view's parameter."""
        if 0 in self.shape:
            return []  # an output without elements
        if any(tensor._version != version for tensor, version in self.saved):
            raise self.changed()
        if self.derived is not None:
            return self.derived
        assert self.gradient is not None
        assert self.layout is not None
        if self.raw:
            return self.derive(self.gradient, self.layout, *(tensor for tensor, _ in self.saved))
        return self.derive(self.layout.first(self.gradient), self.layout, *self._first_saved())

    def _first_saved(self) -> Iterable[Tensor]:
        """The saved tensors, samples first."""
        assert self.layout is not None
        for tensor, _ in self.saved:
            upto = self.layout.dim + 1
            if not self.layout.is_first and tensor.shape[:upto] != self.shape[:upto]:
                raise ClippingError(
                    f"{self.called} uses {self.names} with samples in dimension {self.layout.dim} of its result, which its "
                    "input does not have: keep samples first"
                )
            yield self.layout.first(tensor)

    def keys(self, saved: Iterable[Tensor]) -> set[tuple[int, Any, int]]:
        """What tensors saved by this function are known by: their memory and their place."""
        return {(t.data_ptr(), self.function, k) for k, t in enumerate(saved) if t.numel()}

    def changed(self) -> ClippingError:
        """The error for an input that is not what it was."""
        return ClippingError(
            f"what went into {self.called} with {self.names} was changed in place afterwards; make the change on a copy"
        )

    @property
    def called(self) -> str:
        """The name of the function, for messages."""
        return name_of(self.function)

    @property
    def names(self) -> str:
        """The names of the parameters used, for messages."""
        return ", ".join(repr(view.name) for view in self.views)


class Record(torch.autograd.Function):
    """The identity; its backward leaves the gradient in the use. In place, so that later in-place changes are allowed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, use: Use) -> Tensor:
        ctx.use = use
        ctx.mark_dirty(output)
        ctx.save_for_backward(*use.given)
        use.given = ()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        use: Use = ctx.use
        if torch.is_grad_enabled():
            raise ClippingError(
                f"a gradient of a gradient passes {use.called}: second derivatives have no clipping rule"
            )
        try:
            saved = ctx.saved_tensors  # in a checkpoint, this computes them again
        except RuntimeError as error:
            raise (use.changed() if "modified by an inplace operation" in str(error) else error) from None
        if use.replayed is not None and not use.replayed.issuperset(use.keys(saved)):
            raise ClippingError(
                f"{use.called} with {use.names} runs inside hooks on saved tensors that are not those of torch.utils.checkpoint, "
                "or is not run again in the same way: remove the hooks, or switch checkpointing off and use smaller micro-batches"
            )
        with torch._C.DisableTorchFunction():  # a recorder may be active, for checkpoints
            use.saved = tuple((tensor, tensor._version) for tensor in saved)
            gradient = gradient.contiguous()  # once, where each look at it as a matrix would make a copy
            if use.take is not None:
                use.take(gradient)
            else:
                use.gradient = gradient
        return (gradient if ctx.needs_input_grad[0] else None), None, None
