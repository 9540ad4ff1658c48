"""Record every use of every trainable parameter in a forward pass, and refuse what cannot be recorded.

While a `Recorder` is active, every torch function that receives a trainable parameter, or a view of one, comes here first:

- a function with a *rule* runs with the parameter detached, and is recorded as a *use*: its output, and how the gradient at that
  output becomes the parameter's gradient, sample by sample;
- a function of parameters alone makes a *view* or a parameter of its own: see `views.py`;
- a function of torch that is written in Python is entered;
- a function whose result carries no gradient (a size, a detached copy) runs as it is;
- anything else raises.

Parameters are always detached, so autograd never reaches one through a torch function. What is not a torch function (a custom
autograd.Function) is in the graph: `guard.check_graph` finds it there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dpformer.clipping.axis import Layout
from dpformer.clipping.gradient import Route
from dpformer.clipping.guard import Shared
from dpformer.clipping.registry import LAZY, MAKES_VIEWS, RULES, entered, name_of, writes
from dpformer.clipping.sums import sizes
from dpformer.clipping.use import Derive, Forms, Record, Use
from dpformer.clipping.views import Derived, View
from dpformer.errors import ClippingError


class Recorder(TorchFunctionMode):
    """Records the uses of the trainable parameters of `module`; a context manager around the forward pass."""

    def __init__(self, module: nn.Module, route: Route | None = None) -> None:
        super().__init__()
        self.route = route  # how samples will be measured: see `tiles.Kept`
        self.uses: list[Use] = []
        parameters = list(module.named_parameters())
        self.trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self.shared = Shared([*module.buffers(), *(p for _, p in parameters if not p.requires_grad)])
        self._views = {id(p): View(p, name, p) for name, p in self.trainable}
        # Functions of parameters alone, by the identity of the parameter that stands for each.
        self.derived: dict[int, Derived] = {}
        # Look-ups that were recorded, by identity, and what makes a view of each: see `note_broadcast`.
        self._broadcasts: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        # Whether a use is inside a checkpoint; whether checkpoints are being computed again, and what rules saved in that.
        self.checkpoints = self.replaying = False
        self._replayed: set[tuple[int, Any, int]] = set()
        # Every recorded output depends on this, so one backward pass to it reaches all of them and nothing else.
        self.anchor = torch.zeros((), requires_grad=True)

    def used(self) -> set[int]:
        """The identities of the parameters that have a use."""
        used = {id(view.parameter) for use in self.uses for view in use.views}
        return used.union(*(map(id, origin.sources) for key, origin in self.derived.items() if key in used))

    def view(self, value: Any) -> View | None:
        """The view that `value` is, or None for anything that is not a trainable parameter or a part of one."""
        return self._views.get(id(value)) if isinstance(value, Tensor) else None

    def value(self, value: Any) -> Any:
        """`value` detached, if it is a parameter or comes from one; everything else as it is."""
        return value.detach() if self.view(value) is not None else value

    def data(self, function: Any, value: Tensor) -> Tensor:
        """An input that may not be a parameter."""
        if (view := self.view(value)) is not None:
            raise self.refuse(function, view, "takes it as its input rather than its weight")
        return value

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function while recording, from inside of a rule."""
        with self:
            return function(*args, **kwargs)

    def derive(self, function: Any, args: Any, kwargs: dict[str, Any], views: list[View]) -> Any:
        """Make parameters of the results of a function of parameters alone."""
        first = self.view(args[0] if args else None)
        if (first and writes(getattr(function, "__name__", ""))) or kwargs.get("out") is not None:
            raise self.refuse(function, views[0], "writes into it; write it without the underscore, on a copy")
        repeated = any(view.repeated for view in views) or bool(first and first.repeats(function, args[1:], kwargs))
        has_batch = repeated or any(view.has_batch for view in views)
        sources: dict[int, nn.Parameter] = {}
        for view in views:
            origin = self.derived.get(id(view.parameter))
            sources |= {id(p): p for p in ((view.parameter,) if origin is None else origin.sources)}
        names = ", ".join(name for name, p in self.trainable if id(p) in sources)

        def own(out: Any) -> Any:
            if not isinstance(out, Tensor) or not out.requires_grad:
                if isinstance(out, Tensor):
                    self.shared.add(out)
                return out
            if out.is_complex():
                raise self.refuse(function, views[0], "makes it complex")
            whole = nn.Parameter(out.detach())
            self.derived[id(whole)] = Derived(out, tuple(sources.values()))
            view = View(whole, names, whole, has_batch=has_batch, repeated=repeated, attach=lambda: out)
            return self.add_view(view)

        # In a checkpoint this is kept, and not computed again: its graph is not that of the losses.
        with saved_tensors_hooks(_same, _same) if _hooked() else nullcontext():
            attached = {id(view.value): view.attached() for view in views}
            out = function(*_swap(args, attached), **_swap(kwargs, attached))
        return tree_map(own, out)

    def add_view(self, view: View) -> Tensor:
        """Remember a view and give its value, to be returned to the model."""
        self._views[id(view.value)] = view
        return view.value

    def record(
        self,
        function: Any,
        output: Tensor,
        views: Iterable[View | None],
        derive: Derive,
        saved: Iterable[Tensor] = (),
        raw: bool = False,
    ) -> Tensor:
        """Remember a use; returns `output`, to be returned to the model in its place.

        `saved` are the tensors that `derive` will get, which must not change until then. Samples lie in them as in the output.
        raw: `derive` gets them and the gradient as they are, and not samples first.
        """
        if output.dtype is torch.float16:
            raise ClippingError(
                f"{name_of(function)} computes in float16, where small gradients become 0 and large ones infinite: use "
                "torch.autocast with bfloat16, or float32"
            )
        used, saved = tuple(view for view in views if view is not None), tuple(saved)
        use = Use(function, used, derive, output.shape, saved, raw)
        if self.replaying:
            self._replayed.update(use.keys(saved))
        else:
            self.uses.append(use)
            if _hooked():
                self.checkpoints = True
                use.replayed = self._replayed
        # In place, so that it stays the same tensor for a function that wrote in place; that cannot be done to a view.
        return Record.apply(output.clone() if output._is_view() else output, self.anchor, use)

    def backward(self, total: Tensor, retain_graph: bool) -> None:
        """Fill in the gradients of the uses. What checkpoints compute again in it goes through the same rules, unrecorded."""
        if not self.checkpoints:
            torch.autograd.grad(total, self.anchor, allow_unused=True, retain_graph=retain_graph)
            return
        with self.replay():
            one = torch.ones_like(total)
            # torch.autograd.grad would hand itself to the recorder, which is not active while it handles a function.
            # Not accumulated, and whatever does not depend on the anchor is fine.
            _engine_run_backward((total,), (one,), retain_graph, False, (self.anchor,), True, accumulate_grad=False)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Be active, if there are checkpoints, without recording."""
        if not self.checkpoints:
            yield
            return
        self.replaying = True
        try:
            with self:
                yield
        finally:
            self.replaying = False

    def record_rows(self, function: Any, view: View) -> Tensor:
        """Make a use of a view that has the batch in it; returns its value."""
        output = view.value.detach().clone()

        def derive(gradient: Tensor, samples: Layout) -> Forms:
            samples.demand_first(view.name)
            bound = sizes(gradient.reshape(samples.batch, -1))
            return [(view, view.from_gradient(gradient, samples.batch, bound, own_rows=True))]

        return self.record(function, output, [view], derive)

    def note_broadcast(self, output: Tensor, make: Callable[[], Tensor]) -> None:
        """Remember that the look-up just recorded may be meant to be broadcast over samples: then `make` gives its view."""
        self._broadcasts[id(output)] = output, make

    def forget(self) -> None:
        """Drop what refers back to the recorder: a circle would keep the memory of a pass until the collector comes."""
        self._broadcasts.clear()

    def refuse(self, function: Any, view: View, why: str = "has no clipping rule") -> ClippingError:
        """The error for a parameter in a place where its per-sample gradient cannot be computed."""
        return ClippingError(
            f"parameter {view.name!r} is used by {name_of(function)}, which {why}: its gradient would escape the norm. "
            "Write the layer with functions that have rules (linear, embedding, layer_norm, rms_norm, addmm, matmul, "
            "indexing, + and *), add a rule with dpformer.clipping.register_rule, or freeze the parameter"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PLAIN:
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if self._broadcasts and rule in LAZY:
            args, kwargs = self._broadcast(args, kwargs)
        tensors: list[Tensor] = []
        _collect((*args, *kwargs.values()), tensors)
        views = [self._views[id(t)] for t in tensors if id(t) in self._views]
        if not views:
            out = func(*args, **kwargs)
            self.shared.note(func, args, kwargs, tensors, out)
            if self._broadcasts and rule in LAZY and rule in MAKES_VIEWS and args and id(args[0]) in self._broadcasts:
                make = self._broadcasts[id(args[0])][1]
                self.note_broadcast(out, lambda: self.call(func, make(), *args[1:], **kwargs))
            return out
        alone = all(id(t) in self._views or (not t.requires_grad and self.shared.is_constant(t)) for t in tensors)
        if not torch.is_grad_enabled() or (rule is None and getattr(func, "__name__", "") in KEPT):
            out = func(*args, **kwargs)
            if alone and isinstance(out, Tensor):
                self.shared.add(out)
            return out
        if alone and rule is not None and rule in MAKES_VIEWS:
            return rule(self, func, *args, **kwargs)
        if alone and not any(view.repeated for view in views):
            return self.derive(func, args, kwargs, views)
        # Rows picked, or a parameter repeated, for each sample: the batch is in there already, so that is a use.
        if batched := [view for view in views if view.has_batch and (rule not in LAZY or len(views) > 1)]:
            swapped = {id(view.value): self.record_rows(func, view) for view in batched}
            args, kwargs = _swap(args, swapped), _swap(kwargs, swapped)
            views = [view for view in views if not view.has_batch]
        if not views:
            return func(*args, **kwargs)
        if rule is not None:
            return rule(self, func, *args, **kwargs)
        if (python := entered(func)) is not None:
            return self.call(python, *args, **kwargs)
        # A size or a comparison has no gradient to lose. Values are leaves, so everything else shows itself.
        out = func(*args, **kwargs)
        results: list[Tensor] = []
        _collect((out,), results)
        if any(t.requires_grad for t in results):
            raise self.refuse(func, views[0])
        return out

    def _broadcast(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Put the views of look-ups in their place where they meet a tensor with more samples."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        others = [a for a in tensors if id(a) not in self._broadcasts and a.dim() and a.shape[0] > 1]
        swapped = {}
        for one in tensors:
            least = one.dim() + (one.dim() == 0 or one.shape[0] != 1)
            if id(one) in self._broadcasts and any(a.dim() >= least for a in others):
                swapped[id(one)] = self._broadcasts[id(one)][1]()
        return (_swap(args, swapped), _swap(kwargs, swapped)) if swapped else (args, kwargs)


# Properties of a tensor that are not tensors: they are read hundreds of times in a forward pass.
PLAIN: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, torch._C._set_grad_enabled),
}

# Functions whose results carry no gradient, or are for looking at: they run as they are.
KEPT = {"detach", "__repr__", "__format__", "__bool__", "__float__", "__int__", "item", "tolist", "__hash__"}


def _hooked() -> bool:
    """Whether there are hooks on saved tensors, as in a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> None:
    """Add all tensors among values to `tensors`. Not a generator: this runs for every operation of a forward pass."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, tensors)
        elif isinstance(value, dict):
            _collect(value.values(), tensors)


def _swap(values: Any, swapped: dict[int, Tensor]) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_swap(v, swapped) for v in values)
    if isinstance(values, dict):
        return {key: _swap(v, swapped) for key, v in values.items()}
    return swapped.get(id(values), values)
