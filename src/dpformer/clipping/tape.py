"""The record of every use of every trainable parameter while a forward pass runs, and the guard.

While a `Tape` is active, every torch function that receives a trainable parameter, or a view of one, comes here first:

- a function with a *rule* runs with the parameter detached. Its output is remembered together with how the gradient at
  that output becomes the parameter's gradient, sample by sample: that is a *use*;
- a function that only moves elements (transpose, slice, rows at positions) makes a *view*;
- a function whose result carries no gradient (a size, a detached copy) runs as it is;
- anything else raises.

Since parameters are always detached, autograd itself never reaches one, and `Tape.check_graph` looks for that after the
forward pass: no gradient can come to a parameter except through a recorded use. That is the security property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from dpformer.clipping.forms import Form
from dpformer.clipping.views import View
from dpformer.errors import ClippingError

# From the gradient at a use's output and the batch size to the forms that it adds, one or more for each view used.
Derive = Callable[[Tensor, int], Iterable[tuple[View, Form]]]


@dataclass
class Use:
    """One call of `function` with one or more parameters; `gradient` is the one at its output, after the backward."""

    function: str
    views: tuple[View, ...]
    derive: Derive
    shape: torch.Size
    merged: int | None
    gradient: Tensor | None = field(default=None, repr=False)

    @property
    def names(self) -> str:
        """The names of the parameters used, for messages."""
        return ", ".join(repr(view.name) for view in self.views)


class Tape(TorchFunctionMode):
    """Records the uses of the trainable parameters of `module`; a context manager around the forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.uses: list[Use] = []
        # Selecting by a mask gives tensors whose first dimension may be anything: see `PhantomClipping`.
        self.ragged = False
        self._views: dict[int, View] = {}
        self._trainable: dict[int, str] = {}
        self._shared: dict[int, Tensor] = {}
        # Tensors that are others with their first dimensions merged, and the first dimension those had.
        self._merged: dict[int, tuple[int, Tensor]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._trainable[id(parameter)] = name
                self._views[id(parameter)] = View(parameter, name, parameter)
            else:
                self._shared[id(parameter)] = parameter
        for buffer in module.buffers():
            self._shared[id(buffer)] = buffer
        # Every recorded output hangs on this, so one backward to it passes all of them and nothing else.
        self.anchor = torch.zeros((), requires_grad=True)

    # -- for rules ---------------------------------------------------------------------------------------------

    def view(self, value: Any) -> View | None:
        """The view that `value` is, or None for anything that is not a trainable parameter or a part of one."""
        return self._views.get(id(value)) if isinstance(value, Tensor) else None

    def value(self, value: Any) -> Any:
        """`value` cut off from the parameter it is or comes from; everything else as it is."""
        return value.detach() if self.view(value) is not None else value

    def is_shared(self, value: Tensor) -> bool:
        """Whether a tensor is known to be the same for all samples: a buffer, made from sizes alone, or of these."""
        return id(value) in self._shared

    def add_view(self, view: View) -> Tensor:
        """Remember a view and give its value, to be returned to the model."""
        self._views[id(view.value)] = view
        return view.value

    def record(
        self, function: Any, output: Tensor, views: Iterable[View | None], derive: Derive, like: Tensor
    ) -> Tensor:
        """Remember a use; returns `output`, to be returned to the model in its place.

        `like` is the tensor whose first dimension says how samples lie in the output.
        """
        used = tuple(view for view in views if view is not None)
        merged = self._merged[id(like)][0] if id(like) in self._merged else None
        use = Use(_name(function), used, derive, output.shape, merged)
        self.uses.append(use)
        if output._is_view():
            output = output.clone()
        return _Record.apply(output, self.anchor, use)

    def record_rows(self, function: Any, view: View) -> Tensor:
        """Make a use of a view that has the batch in it; returns its value."""
        output = view.value.detach().clone()

        def derive(gradient: Tensor, batch: int) -> list[tuple[View, Form]]:
            bound = torch.linalg.vector_norm(gradient.reshape(batch, -1), dim=1)
            return [(view, view.from_gradient(gradient, batch, bound, own_rows=True))]

        return self.record(function, output, [view], derive, like=output)

    def refuse(self, function: Any, view: View, why: str = "has no clipping rule") -> ClippingError:
        """The error for a parameter in a place where its per-sample gradient is not known."""
        return ClippingError(
            f"parameter {view.name!r} is used by {_name(function)}, which {why}: its gradient would escape the norm. "
            "Write the layer with functions that have rules (linear, embedding, layer_norm, rms_norm, addmm, matmul, "
            "indexing, + and *), add a rule with dpformer.clipping.register_rule, or freeze the parameter"
        )

    # -- the mode ----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors(args)) + list(_tensors(kwargs.values()))
        views = [view for t in tensors if (view := self._views.get(id(t))) is not None]
        if not views:
            out = func(*args, **kwargs)
            if all(id(t) in self._shared for t in tensors):
                for t in _tensors((out,)):
                    self._shared[id(t)] = t
            elif func in _RESHAPES:
                self._note_merge(tensors[0], out)
            elif func in _RAGGED and (func is not torch.Tensor.__getitem__ or _has_mask(args[1])):
                self.ragged = True
            return out
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is None:
            # An attribute or a comparison has no gradient to lose. Values are leaves, so everything else shows itself.
            out = func(*args, **kwargs)
            if not any(t.requires_grad for t in _tensors((out,))):
                return out
        if rule is None or rule not in LAZY or len(views) > 1:
            # Rows picked, or a parameter repeated, for each sample: the batch is in there already, so that is a use.
            swapped = {id(view.value): self.record_rows(func, view) for view in views if view.has_batch}
            args, kwargs = _swap(args, swapped), {key: _swap(value, swapped) for key, value in kwargs.items()}
            views = [view for view in views if not view.has_batch]
        if not views:
            return func(*args, **kwargs)
        if rule is None:
            raise self.refuse(func, views[0])
        return rule(self, func, *args, **kwargs)

    def _note_merge(self, before: Tensor, after: Tensor) -> None:
        joined = before.dim() - after.dim() + 1
        if joined > 1 and after.shape[1:] == before.shape[joined:]:
            self._merged[id(after)] = before.shape[0], after

    # -- after the forward pass --------------------------------------------------------------------------------

    def check_graph(self, losses: Tensor) -> None:
        """Raise if any leaf other than the anchor can receive a gradient from `losses`."""
        seen: set[Any] = set()
        stack = [(losses.grad_fn, "the loss")]
        while stack:
            node, user = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf is not self.anchor:
                view = self._views.get(id(leaf))
                if view is not None:
                    raise self.refuse(user, view, "was not seen by the recorder")
                raise ClippingError(
                    f"a tensor of shape {tuple(leaf.shape)} that requires a gradient reaches the loss through {user} and is "
                    "no parameter of the module: give PhantomClipping the module that holds it, or detach it"
                )
            stack.extend((following, node.name()) for following, _ in node.next_functions)

    def unused(self) -> list[str]:
        """Names of trainable parameters without a use."""
        used = {id(view.parameter) for use in self.uses for view in use.views}
        return [name for key, name in self._trainable.items() if key not in used]


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
# Rules that can take a view whose first dimension may be the samples, and so leave it a view.
LAZY: set[Rule] = set()


def register_rule(*functions: Any, lazy: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: `rule(tape, function, *args, **kwargs)` takes the place of `functions` while a tape is active.

    The rule computes the output with `tape.value(...)` of its arguments (never with a parameter itself) and returns
    `tape.record(function, output, views, derive, like=input)`, where `derive(gradient, batch)` turns the gradient at the
    output into one form (`Outer`, `Sparse` or `Dense`) for each view.
    """

    def add(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        if lazy:
            LAZY.add(rule)
        return rule

    return add


class _Record(torch.autograd.Function):
    """The identity; its backward leaves the gradient in the use. In place, so that later in-place changes are allowed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, use: Use) -> Tensor:
        ctx.use = use
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.use.gradient = gradient
        return (gradient if ctx.needs_input_grad[0] else None), None, None


_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten}
_RAGGED = {
    torch.Tensor.__getitem__,
    torch.masked_select,
    torch.Tensor.masked_select,
    torch.nonzero,
    torch.Tensor.nonzero,
}


def _has_mask(key: Any) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8) for k in keys)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _swap(values: Any, swapped: dict[int, Tensor]) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_swap(v, swapped) for v in values)
    return swapped.get(id(values), values)


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    return resolve_name(function) or getattr(function, "__name__", str(function))
