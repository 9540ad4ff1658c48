"""Phantom Clipping: exact per-sample clipping for any model, shared parameters included, with one backward pass."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from dpformer.clipping import rules  # noqa: F401  (fills the registry)
from dpformer.clipping.algebra import Dense, Form, Lazy, merge
from dpformer.clipping.clip import Clip, Rule
from dpformer.clipping.gradient import Formed, Gradient, Route, gradient_of, shorten
from dpformer.clipping.guard import WeightedPass, check_graph, locate
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.tied import Head, TiedGradient, Weigh
from dpformer.clipping.workspace import Workspace
from dpformer.errors import ClippingError

# Batches after which a parameter that none of them used is an error.
PATIENCE = 100

Losses = Callable[[], Tensor]


class PhantomClipping:
    """Clips the gradient of each sample to `max_norm` and adds the sum to `.grad`.

    Guarantee: with `rule` either "flat" or "automatic", adding or removing one sample changes the sum that `backward`
    adds by at most `max_norm` (up to a relative 1e-6) in L2 norm over all trainable parameters of `module`, if the loss of a
    sample is a function of that sample and the parameters alone. What could break it raises a `ClippingError` with the
    parameter and the cure (docs/clipping.md has the table). A sample with a NaN or infinite gradient adds nothing, and is
    counted in `nonfinite`. An empty batch adds nothing. A parameter that a batch does not use has gradient 0; it is an error
    after 100 batches, and by `check_used`.

    What cannot be seen here is a dependence on other samples that carries no gradient: a division by the number of tokens in
    the batch, or inputs normalised by statistics of the batch. Divide by constants, or by a sample's own length.

    scales: factors of the gradients of some parameters, by name. Norms and sums are of the scaled gradients, so that a
    parameter with a small factor takes little of the norm from the others. The table of a `TiedCrossEntropy` has none.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clipping = PhantomClipping(model, max_norm=1.0, rule="flat")
    >>> clipping.backward(lambda: model(x)[:, 0])
    tensor([5.0000, 0.5000], dtype=torch.float64)
    >>> model.weight.grad  # (3, 4) / 5 + (0.3, 0.4)
    tensor([[0.9000, 1.2000]])
    """

    def __init__(
        self,
        module: nn.Module,
        max_norm: float = 1.0,
        rule: Rule = "automatic",
        route: Route | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ClippingError(
                f"the module is wrapped in {type(module).__name__}, whose sums over processes take no part in clipping: give its "
                "`.module`, and add up the clipped sums of all processes (all_reduce on each .grad) before noise is added, once"
            )
        self.module = module
        self.clip = Clip(max_norm, rule)
        self.route = route
        self.scales = dict(scales or {})
        self.nonfinite = 0  # samples whose gradient was not finite, since this object was made
        self._checked = False
        self._batches, self._unused = 0, [name for name, p in module.named_parameters() if p.requires_grad]
        self._workspace = Workspace()
        self._eps = _check_parameters((name, p) for name, p in module.named_parameters() if p.requires_grad)
        if unknown := self.scales.keys() - self._unused:
            raise ClippingError(f"scales has {min(unknown)!r}, which is no trainable parameter of the module")

    @property
    def sensitivity(self) -> float:
        """How much one sample can change the sum, in L2 norm: noise is calibrated to it."""
        return self.clip.max_norm

    def backward(self, compute_losses: Losses) -> Tensor:
        """Run the forward pass that returns one loss per sample `[B]`; add `sum_i c_i g_i` to `.grad`.

        Returns the gradient norms `|g_i|`, `[B]`, float64. They are not private.
        """
        return self._run(compute_losses, lambda samples, squared, bound: self.clip.factors(squared, bound, self._eps))

    def check_used(self) -> None:
        """Raise if a trainable parameter was not used by any batch so far."""
        if self._unused and self._batches:
            more = f" (and {len(self._unused) - 1} more)" if len(self._unused) > 1 else ""
            raise ClippingError(
                f"parameter {self._unused[0]!r}{more} requires a gradient and none of {self._batches} batches has used it: "
                "freeze it with requires_grad_(False), or use it"
            )

    def norms(self, compute_losses: Losses) -> Tensor:
        """The gradient norms `[B]` alone; `.grad` is left as it is. They are not private."""
        return self._run(compute_losses, None)

    def weighted_sum(self, compute_losses: Losses, weights: Tensor) -> Tensor:
        """Add `sum_i weights[i] g_i` to `.grad`, for weights `[B]` of the caller's; returns the norms.

        Weights that are not computed by a clipping rule carry no guarantee.
        """

        def checked() -> Tensor:
            losses = compute_losses()
            if weights.shape != losses.shape:
                raise ClippingError(f"weights have shape {tuple(weights.shape)}, losses {tuple(losses.shape)}")
            return losses

        return self._run(checked, lambda i, squared, _: torch.where(squared.isfinite(), weights.to(squared)[i], 0.0))

    def _run(self, compute_losses: Losses, weigh: Weigh | None) -> Tensor:
        recorder = Recorder(self.module, self.route)
        trainable = recorder.trainable
        self._eps = _check_parameters(trainable)
        held = {name: (p.grad, p.grad._version if p.grad is not None else 0) for name, p in trainable}
        with torch.enable_grad(), _uncompiled(), recorder:
            losses = compute_losses()
        _check_losses(losses)
        batch = len(losses)
        if batch:
            with _precise(losses):
                self._differentiate(recorder, losses)
        for name, p in trainable:
            grad, version = held[name]
            if p.grad is not grad or (grad is not None and grad._version != version):
                p.grad = None
                raise ClippingError(f"a gradient reached parameter {name!r} past the recorder, and was thrown away")
        for _, p in trainable if weigh is not None else ():
            # Contiguous whatever the parameter is, because forms are added to it as to a matrix.
            p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device) if p.grad is None else p.grad.contiguous()
        if batch == 0:
            return torch.zeros(0, dtype=torch.float64)
        with torch.no_grad(), _precise(losses):
            return self._sum(recorder, losses.detach(), weigh)

    def _differentiate(self, recorder: Recorder, losses: Tensor) -> None:
        """Fill in the gradient at the output of every use, and keep the uses that have one."""
        users = check_graph(recorder, losses)
        used = recorder.used()
        self._unused = [name for name, p in recorder.trainable if id(p) not in used and name in self._unused]
        self._batches += 1
        if self._batches >= PATIENCE:
            self.check_used()
        batch = len(losses)
        for use in recorder.uses:
            use.gradient = None  # a backward pass inside the model may have left one
        with recorder.replay():
            doubt = locate(recorder, losses, users)
        suspect = batch > 1 and (doubt is not None or not self._checked)
        weighted = WeightedPass(recorder, losses, exact=doubt is not None) if suspect else None
        # What is sure to be a parameter's only use is derived where its gradient comes up: in the processor's cache, and in
        # memory that is free again for the next.
        times = Counter(id(view.parameter) for use in recorder.uses for view in use.views)
        once = {key for key, count in times.items() if count == 1}
        early = [] if suspect else [u for u in recorder.uses if all(id(view.parameter) in once for view in u.views)]
        for use in early:
            use.take = partial(use.settle, self.route)
        try:
            recorder.backward(losses.sum(), retain_graph=False)
        finally:
            for use in early:
                use.take = None  # it knows the use: a circle would keep the memory of a pass until the collector comes
        recorder.uses = [u for u in recorder.uses if u.gradient is not None or u.derived is not None]
        if weighted is not None:
            weighted.compare(recorder.uses)
            self._checked = True
        recorder.forget()

    def _sum(self, recorder: Recorder, losses: Tensor, weigh: Weigh | None) -> Tensor:
        batch = len(losses)
        gradients = self._gradients(recorder, batch)
        squared = torch.where(losses.isfinite(), 0.0, torch.nan).double()
        bound = torch.zeros_like(squared)
        # The last tied table is measured and added in one pass, after all other norms.
        tied = [g for g, _ in gradients if isinstance(g, TiedGradient)][-1:]
        others = [(g, scale) for g, scale in gradients if g not in tied]
        for gradient, scale in others:
            s, b = gradient.measure()
            squared, bound = squared + scale**2 * s, bound + scale**2 * b
        if tied:
            s, b = tied[0].clip(weigh, rest=(squared, bound))
            squared, bound = squared + s, bound + b
        if weigh is not None:
            dropped = ~(squared.isfinite() & bound.isfinite())
            if dropped.any():
                self.nonfinite += int(dropped.sum())
                for gradient, _ in others:
                    gradient.drop(dropped)
            weights = weigh(torch.arange(batch, device=losses.device), squared, bound)
            for gradient, scale in others:
                gradient.add(scale * weights)
        return squared.clamp_min(0).sqrt()

    def _gradients(self, recorder: Recorder, batch: int) -> list[tuple[Gradient, float]]:
        """One for each parameter used, and its factor; small parameters with one factor share a gradient."""
        scales = {id(p): self.scales.get(name, 1.0) for name, p in recorder.trainable}
        by_parameter: dict[int, tuple[nn.Parameter, list[Form], list[Head]]] = {}
        for use in recorder.uses:
            for view, form in use.forms():
                _, forms, heads = by_parameter.setdefault(id(view.parameter), (view.parameter, [], []))
                heads.append(form) if isinstance(form, Head) else forms.append(form)
                if len(heads) > 1:
                    raise ClippingError(
                        f"TiedCrossEntropy is called twice with {use.names}: call it once, with hidden states joined along time"
                    )
            use.gradient, use.saved = None, ()  # the forms have what they need of it
        gradients: list[tuple[Gradient, float]] = []
        small: dict[tuple[torch.dtype, float], list[tuple[nn.Parameter, Dense]]] = {}
        for key, origin in recorder.derived.items():
            if key in by_parameter:
                pseudo, forms, _ = by_parameter.pop(key)
                for p, form in origin.pull(pseudo, merge(forms), batch):
                    by_parameter.setdefault(id(p), (p, [], []))[1].append(form)
        for key in list(by_parameter):
            p, forms, heads = by_parameter.pop(key)
            forms = merge(forms)  # what was merged is free now
            if len(forms) == 1 and not heads:
                forms = [shorten(p, forms[0], self.route)]
            if heads:
                if any(isinstance(form, Lazy) for form in forms):
                    raise ClippingError("TiedCrossEntropy shares its table with a function of it: use F.cross_entropy")
                if scales[key] != 1:
                    raise ClippingError(
                        "the table of TiedCrossEntropy cannot have a factor in scales: scale the others"
                    )
                gradients.append((TiedGradient(p, heads[0], forms, batch, self.route), 1.0))
            elif len(forms) == 1 and isinstance(form := forms[0], Dense) and form.norms is None:
                small.setdefault((p.dtype, scales[key]), []).append((p, form))
            else:
                gradients.append((gradient_of(p, forms, batch, self.route, self._workspace), scales[key]))
        joined = [(Formed.join(*zip(*parts, strict=True)), scale) for (_, scale), parts in small.items()]
        return [*gradients, *joined]


def _uncompiled() -> AbstractContextManager[object]:
    """What was compiled by torch.compile runs as it was written, so that the recorder sees its functions."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _precise(losses: Tensor) -> AbstractContextManager[object]:
    """No autocast: it is meant for the forward pass; norms and sums are in the parameters' type."""
    kind = losses.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _check_parameters(trainable: Iterable[tuple[str, nn.Parameter]]) -> float:
    """An error if one of them cannot be clipped; returns the coarsest precision among them."""
    eps = 0.0
    for name, p in trainable:
        if p.dtype not in (torch.float32, torch.float64):
            raise ClippingError(
                f"parameter {name!r} is {p.dtype}: a sum in this type rounds by more than one sample may add. "
                "Keep parameters in float32 and run the forward pass under torch.autocast"
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ClippingError(f"parameter {name!r} has a gradient hook, which would not run here; remove it")
        eps = max(eps, torch.finfo(p.dtype).eps)
    return eps


def _check_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ClippingError(
            f"compute_losses must return one loss per sample, shape [B], not {shape}: use reduction='none' and sum over "
            "positions, not over samples"
        )
    if len(losses) and not losses.requires_grad:
        raise ClippingError("the losses do not depend on any trainable parameter")
