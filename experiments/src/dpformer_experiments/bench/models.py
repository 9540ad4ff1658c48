"""A clipped backward pass of models that are not ours: beside plain PyTorch, and Opacus by hooks and by ghost clipping.

GPT-2 (tied), ALBERT (one block, used in all layers; tied) and ViT of `transformers`, from random weights. Each measurement has a
process of its own: processor time of a forward and backward pass, one thread, after a first that does not count; peak memory.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer import PhantomClipping
from dpformer_experiments.bench.child import run_child

CONTENDERS = ("plain", "phantom", "opacus hooks", "opacus ghost")
# layers, width, vocabulary or image size, batch, length
SIZES = {
    "gpt2": (12, 768, 50_257, 8, 128),
    "gpt2, padded": (12, 768, 50_257, 8, 128),
    "albert": (12, 768, 30_000, 8, 128),
    "vit": (12, 384, 224, 8, 196),
}
QUICK = {
    "gpt2": (2, 256, 8_000, 8, 128),
    "gpt2, padded": (2, 256, 8_000, 8, 128),
    "albert": (4, 256, 8_000, 8, 128),
    "vit": (2, 192, 96, 8, 36),
}


def run(quick: bool, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Seconds and MB of each contender on each model, over those of plain PyTorch; or what it raises."""
    figures: dict[str, Any] = {"load": os.getloadavg()[0], "torch": torch.__version__, "quick": quick}
    for name, sizes in (QUICK if quick else SIZES).items():
        rows = {}
        for contender in CONTENDERS:
            say(f"{name}: {contender}")
            one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            rows[contender] = run_child(
                f"{__name__}:measure", one, name=name, contender=contender, sizes=list(sizes), steps=3
            )
        figures[name] = {"sizes": sizes, **rows}
    return figures


def measure(name: str, contender: str, sizes: list[int], steps: int) -> dict[str, Any]:
    """The median processor time of a pass; `run_child` adds the peak memory of the process."""
    torch.manual_seed(0)
    model, losses = _model(name, *sizes)
    try:
        step = _step(contender, model, losses)
        step()
        times = []
        for _ in range(steps):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
    except Exception as error:  # noqa: BLE001  (what a peer raises is its result)
        return {"raises": type(error).__name__}
    return {"pass_seconds": sorted(times)[len(times) // 2]}


def _model(
    name: str, layers: int, d: int, size: int, batch: int, length: int
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    import transformers

    hf: Any = transformers

    model: nn.Module
    config: Any
    if name == "vit":
        config = hf.ViTConfig(
            hidden_size=d,
            intermediate_size=4 * d,
            num_hidden_layers=layers,
            num_attention_heads=d // 64,
            image_size=size,
            num_labels=100,
        )
        model, images, labels = (
            hf.ViTForImageClassification(config),
            torch.randn(batch, 3, size, size),
            torch.arange(batch),
        )
        return model.train(), lambda m: F.cross_entropy(m(pixel_values=images).logits, labels, reduction="none")
    if name == "albert":
        config = hf.AlbertConfig(
            vocab_size=size,
            embedding_size=128,
            hidden_size=d,
            intermediate_size=4 * d,
            num_hidden_layers=layers,
            num_attention_heads=d // 64,
        )
        model = hf.AlbertForMaskedLM(config)
    else:
        dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=size,
                n_embd=d,
                n_layer=layers,
                n_head=d // 64,
                n_positions=length,
                bos_token_id=0,
                eos_token_id=0,
                **dropout,
            )
        )
    ids = torch.randint(1, size, (batch, length))
    mask = (
        (torch.arange(length) < torch.linspace(length // 2, length, batch)[:, None]).long()
        if "padded" in name
        else None
    )

    def losses(m: nn.Module) -> Tensor:
        each = F.cross_entropy(
            m(input_ids=ids, attention_mask=mask).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        return each.mean(1) if mask is None else (each * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)

    return model.train(), losses


def _cleared(model: nn.Module, backward: Callable[[], object]) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad()
        backward()

    return step


def _step(contender: str, model: nn.Module, losses: Callable[[nn.Module], Tensor]) -> Callable[[], object]:
    """A forward pass and a clipped backward pass, gradients cleared before."""
    if contender == "phantom":
        clipping = PhantomClipping(model, rule="flat")
        return _cleared(model, lambda: clipping.backward(lambda: losses(model)))
    if contender == "plain":
        return _cleared(model, lambda: losses(model).sum().backward())
    import opacus
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

    if contender == "opacus hooks":
        hooked = opacus.GradSampleModule(model, loss_reduction="sum")
        optimizer = opacus.optimizers.DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            loss_reduction="sum",
        )

        def by_hooks() -> None:
            optimizer.zero_grad()
            losses(hooked).sum().backward()
            optimizer.pre_step()

        return by_hooks
    ghost = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )

    def by_ghosts() -> None:
        model.zero_grad()
        ghost.enable_hooks()
        each = losses(ghost)
        each.sum().backward(retain_graph=True)
        factors = ghost.get_clipping_coef()
        model.zero_grad()
        ghost.disable_hooks()
        (each * factors).sum().backward()

    return by_ghosts


def show(figures: dict[str, Any]) -> Table:
    """As a table for the terminal."""
    table = Table("model", *CONTENDERS, title="time / memory of a pass over plain PyTorch's")
    for name, rows in figures.items():
        if isinstance(rows, dict):
            table.add_row(name, *(_cell(rows[contender], rows["plain"]) for contender in CONTENDERS))
    return table


def _cell(row: dict[str, Any], plain: dict[str, Any]) -> str:
    if "raises" in row:
        return f"raises {row['raises']}"
    return f"{row['pass_seconds'] / plain['pass_seconds']:.2f} / {row['peak_mb'] / plain['peak_mb']:.2f}"
