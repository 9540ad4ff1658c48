"""The list of functions that are trusted to keep samples apart, each against the gradients that autograd computes."""

import math

import pytest
import torch
from torch.nn import functional as F

from dpformer.clipping.axis import MIXED, Axis, place
from dpformer.clipping.kinds import KINDS, kind_of

B = 4
X = (4, 5, 4, 8)  # several dimensions could hold the samples
IDS = torch.tensor([0, 1, 2, 3])
POSITIVE = {"log", "sqrt", "pow", "rsqrt", "log1p", "xlogy"}
CALLS = {
    **{
        name: getattr(torch, name)
        for name in [
            "exp",
            "tanh",
            "sigmoid",
            "log",
            "sqrt",
            "rsqrt",
            "sin",
            "erf",
            "abs",
            "square",
            "log1p",
            "neg",
            "clone",
        ]
    },
    **{
        name: getattr(F, name)
        for name in [
            "relu",
            "gelu",
            "silu",
            "mish",
            "softplus",
            "elu",
            "leaky_relu",
            "hardtanh",
            "hardswish",
            "logsigmoid",
        ]
    },
    "add": lambda x: x + x.detach(),
    "to the batch": lambda x: x[:1] + torch.ones(X),
    "to the time": lambda x: x[:, :1] * torch.rand(X),
    "one dimension more": lambda x: x[0] / (1 + torch.rand(X)),
    "sub": lambda x: 1 - x,
    "pow": lambda x: x**3,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "where": lambda x: torch.where(torch.rand(X) > 0.5, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(torch.rand(X) > 0.5, 0),
    "maximum": lambda x: torch.maximum(x, torch.zeros(X)),
    "lerp": lambda x: torch.lerp(x, torch.ones(X), 0.3),
    "half": lambda x: x.bfloat16(),
    "addcmul": lambda x: torch.addcmul(torch.ones(X), x, torch.rand(X)),
    "expand": lambda x: x[:, :1].expand(X),
    "atan2": lambda x: torch.atan2(x, torch.ones(X)),
    "mse": lambda x: F.mse_loss(x, torch.ones(X), reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(X), reduction="none"),
    "view": lambda x: x.view(20, 32),
    "view, split": lambda x: x.view(2, 2, 5, 32),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x[:, None],
    "squeeze": lambda x: x[:, None].squeeze(1),
    "transpose": lambda x: x.transpose(0, 2),
    "negative transpose": lambda x: x.transpose(-1, -2),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "t": lambda x: x.reshape(20, 32).t(),
    "softmax": lambda x: x.softmax(-1),
    "softmax over time": lambda x: x.softmax(1),
    "softmax over samples": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(2),
    "cumsum": lambda x: x.cumsum(1),
    "slice": lambda x: x[:, 1:3],
    "slice of samples": lambda x: x[1:3],
    "all samples": lambda x: x[0:4],
    "split": lambda x: x.split(2, 1)[0],
    "split, last": lambda x: x.split(2, 1)[2],
    "chunk of samples": lambda x: x.chunk(2, 0)[1],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "cat of samples": lambda x: torch.cat([x, x * 2], 0),
    "flip": lambda x: x.flip(1),
    "flip samples": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 1),
    "roll samples": lambda x: x.roll(1, 0),
    "gather": lambda x: x.gather(3, torch.zeros(4, 5, 4, 1).long()),
    "gather samples": lambda x: x.gather(0, torch.zeros(X).long()),
    "gather some": lambda x: x.gather(3, torch.zeros(2, 5, 4, 1).long()),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2, 3)[0],
    "scatter": lambda x: x.scatter(3, torch.zeros(4, 5, 4, 1).long(), x[..., :1] * 2),
    "glu": F.glu,
    "sum": lambda x: x.sum(1),
    "sum, kept": lambda x: x.sum(1, keepdim=True),
    "sum of two": lambda x: x.sum((1, 3)),
    "sum over samples": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "mean over samples": lambda x: x.mean(0, keepdim=True),
    "var": lambda x: x.var(2),
    "std": lambda x: x.std(3),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1)[0],
    "prod": lambda x: x.prod(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(dim=3),
    "sum over all": lambda x: x.sum(),
    "nll": lambda x: F.nll_loss(x[:, 0, 0], torch.zeros(4).long(), reduction="none"),
    "nll2d": lambda x: F.nll_loss(x, torch.zeros(4, 4, 8).long(), reduction="none"),
    "cross entropy": lambda x: F.cross_entropy(x.transpose(1, 3), torch.zeros(4, 4, 5).long(), reduction="none"),
    "select": lambda x: x[:, 2],
    "select a sample": lambda x: x[1],
    "unbind": lambda x: x.unbind(1)[2],
    "unbind last": lambda x: x.unbind(-1)[0],
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "stack first": lambda x: torch.stack([x, x * 2], 0),
    "layer_norm": lambda x: F.layer_norm(x, (4, 8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "pad": lambda x: F.pad(x, (1, 0)),
    "pad time": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "tril": lambda x: x.tril(),
    "conv": lambda x: F.conv2d(x, torch.randn(3, 5, 3, 3), padding=1),
    "transposed conv": lambda x: F.conv_transpose2d(x, torch.randn(5, 4, 3, 3)),
    "group_norm": lambda x: F.group_norm(x, 5),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
    "upsample": lambda x: F.interpolate(x, scale_factor=2),
    "unfold": lambda x: F.unfold(x, 2),
    "mm": lambda x: x.reshape(20, 32) @ torch.randn(32, 4),
    "mm from the left": lambda x: torch.randn(3, 20) @ x.reshape(20, 32),
    "bmm": lambda x: x @ torch.randn(4, 5, 8, 3),
    "bmm, right": lambda x: torch.randn(4, 5, 3, 4) @ x,
    "addmm": lambda x: torch.addmm(x[0, 0], torch.randn(4, 6), torch.randn(6, 8)),
    "baddbmm": lambda x: torch.baddbmm(x[0], x[0, :, :, :4].detach(), x[0]),
    "baddbmm, left": lambda x: torch.baddbmm(x[0, 0], x[0, :, :, :4], torch.randn(5, 4, 8)),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(5), torch.ones(5)),
    "batch norm in training": lambda x: F.batch_norm(x, None, None, training=True),
    "index": lambda x: x[IDS, IDS],
    "index of samples": lambda x: x[IDS.flip(0)],
    "index of time": lambda x: x[:, torch.tensor([4, 0])],
    "index apart": lambda x: x[:, IDS, :, IDS],
    "two dimensional index": lambda x: x[IDS[:, None], IDS],
    "index_select": lambda x: x.index_select(1, IDS),
    "index_select of samples": lambda x: x.index_select(0, IDS),
    "index_select of others": lambda x: x.index_select(0, IDS.flip(0)),
    "index of some": lambda x: x[torch.tensor([3, 1, 1, 0])],
    "index there and back": lambda x: x[IDS.flip(0)].tanh()[IDS.flip(0)],
    "index of a dimension more": lambda x: x[None, IDS.flip(0)],
    "index_add": lambda x: torch.zeros(8, 5, 4, 8).index_add(0, torch.tensor([7, 0, 3, 3]), x.view(X)),
    "index_add of time": lambda x: torch.zeros(4, 9, 4, 8).index_add(1, torch.tensor([7, 0, 3, 3, 1]), x),
    "index_put": lambda x: torch.zeros(8, 5, 4, 8).index_put((torch.tensor([7, 0, 3, 5]),), x),
    "index_put, one for all": lambda x: torch.zeros(8, 5, 4, 8).index_put((torch.tensor([7, 0]),), x[0]),
    "experts": lambda x: x.view(80, 8)[torch.arange(80).flip(0)].exp().view(80, 8).softmax(1),
    "grouped_mm": lambda x: F.grouped_mm(
        x.float().view(80, 8), torch.ones(2, 8, 4, dtype=torch.float32), offs=torch.tensor([3, 80], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_trusted_is_true(name):
    """For samples in any dimension of the output, the gradient of a sample's part is 0 outside of the part that the rule says."""
    torch.manual_seed(0)
    x = torch.randn(X, dtype=torch.float64)
    x = (x.abs() + 0.1 if name in POSITIVE else x).requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        y = CALLS[name](x)
    finally:
        torch.set_default_dtype(torch.float32)
    claims = 0
    for inner in range(1, y.numel() // B + 1):
        if y.numel() % (inner * B) or place(y.shape, inner, B) is None:
            continue
        ways = {owners if owners is None else tuple(owners.tolist()) for owners in trace(y, inner, x)}
        if len(ways) > 1 or None in ways:
            continue  # not known, mixed, or elsewhere by another way
        claims, owners = claims + 1, torch.tensor(ways.pop())
        for i in range(B):
            mine = torch.arange(y.numel()) // inner % B == i
            (g,) = torch.autograd.grad((y.reshape(-1) * mine).sum(), x, retain_graph=True)
            assert not g.reshape(-1)[owners != i].any(), inner
    wanted = not any(word in name for word in ("over all", "in training", "mm from the left", "one for all"))
    assert bool(claims) or not wanted, "nothing is trusted"


def trace(y, inner, x):
    """The sample that each element of the leaf x belongs to along every way through the graph, by the list; None: not known."""
    samples = torch.arange(B)
    ways, found = [(y.grad_fn, y.output_nr, Axis(inner, samples))], []
    while ways:
        node, output, axis = ways.pop()
        if hasattr(node, "variable"):
            assert node.variable is x
            found.append(axis.owners[torch.arange(x.numel()) // axis.inner % len(axis.owners)])
            continue
        kind = kind_of(node)
        assert kind is not None, f"{node.name()} is not in the list"
        shapes = [None if n is None else tuple(n._input_metadata[k].shape) for n, k in node.next_functions]
        axes = kind(node, tuple(node._input_metadata[output].shape), axis, shapes)
        for (following, k), part in zip(node.next_functions, axes, strict=True):
            if following is not None:
                if part is None or part is MIXED:
                    found.append(None)
                else:
                    ways.append((following, k, part.regular(samples)))
    return found


def test_every_kind_of_function_is_tried():
    seen = set()
    for call in CALLS.values():
        stack = [call((torch.rand(X) + 0.1).requires_grad_()).grad_fn]
        while stack:
            node = stack.pop()
            seen.add(KINDS.get(node.name().rstrip("0123456789")))
            stack += [n for n, _ in node.next_functions if n is not None]
    assert set(KINDS.values()) <= seen


@pytest.mark.parametrize("shape", [(4, 3), (5, 4, 3), (20, 3), (3, 8), (2, 12)])
def test_place_is_the_dimension_of_the_samples(shape):
    for inner in range(1, math.prod(shape) + 1):
        if math.prod(shape) % (inner * B):
            continue
        sample = (torch.arange(math.prod(shape)) // inner % B).view(shape)
        constant = [dim for dim in range(len(shape)) if (sample == sample.select(dim, 0).unsqueeze(dim)).all()]
        dim = place(shape, inner, B)
        assert (dim is not None) == (len(constant) == len(shape) - 1)
        assert dim is None or dim not in constant
