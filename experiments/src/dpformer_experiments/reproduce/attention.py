"""Measure attention distraction: the paper's illustration with real numbers, and the same in a whole Transformer.

1. One query, keys with given noise (large for half of them): expected scores without noise, with noise, corrected on the logits,
   and corrected by the paper's formula.
2. A Transformer trained (without privacy) on the embedded data, then noise on all of its parameters as in the error model.
   Attention by popularity of the key / uniform attention: clean, noisy, noisy and corrected; and the tracked variance of the
   keys' tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping import TiedCrossEntropy
from dpformer.data import Sequences, collate, demo_frame, prepare
from dpformer.evaluation.evaluate import popularity_classes
from dpformer.models import ReAttention, Transformer, TransformerSpec
from dpformer.report.attention_plot import attention_lift
from dpformer_experiments.reproduce.distraction import Distraction, distraction
from dpformer_experiments.reproduce.page import Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = ("head", "torso", "tail")
NORMS: tuple[Literal["pre", "post"], ...] = ("post", "pre")
MAX_LENGTH = 50


def run(seed: int = 0, draws: int = 30, steps: int = 150, noise: float = 1.0) -> dict[str, Any]:
    """All figures."""
    generator = torch.Generator().manual_seed(seed)
    one_query = _one_query(generator)
    transformer = {norm: _transformer(norm, seed, draws, steps, noise) for norm in NORMS}
    rows = []
    for norm, measured in transformer.items():
        for name, lift in measured["lift"].items():
            spread = dict(zip(GROUPS, measured["lift_std"][name], strict=True))
            rows.append({"norm": norm, "noise": name, **dict(zip(GROUPS, lift, strict=True)), "std": spread})
        rows.append({"norm": norm, "noise": "tracked variance", **dict(zip(GROUPS, measured["variance"], strict=True))})
    return {
        "one_query": {which: one_query.bias(which) for which in ("plain", "corrected", "literal")},
        "scores": {name: getattr(one_query, name).tolist() for name in ("true", "plain", "corrected", "literal")},
        "transformer": transformer,
        "noise": noise,
        "draws": draws,
        "rows": rows,
    }


def _one_query(generator: torch.Generator, d: int = 16, L: int = 50, std: float = 2.0) -> Distraction:
    query = torch.randn(d, generator=generator, dtype=torch.float64)
    keys = torch.randn(L, d, generator=generator, dtype=torch.float64) / 2
    var = torch.zeros(L, dtype=torch.float64)
    var[::2] = std**2 * d / query.square().sum()  # the logits' standard deviation is then `std`
    return distraction(query, keys, var, draws=20_000, generator=generator)


def _transformer(norm: Literal["pre", "post"], seed: int, draws: int, steps: int, noise: float) -> dict[str, Any]:
    sequences = prepare(demo_frame()).sequences
    items = int(sequences.items.max())
    frequencies = _document_frequencies(sequences, items)
    reach = torch.tensor([(sequences.lengths >= t).mean() for t in range(1, MAX_LENGTH + 1)], dtype=torch.float32)
    torch.manual_seed(seed)
    model = Transformer(TransformerSpec(items=items, max_length=MAX_LENGTH, d=32, norm=norm, reattention=ReAttention()))
    batches = _train(model, sequences, steps, np.random.default_rng(seed))
    s = collate(sequences, batches[0][:200], MAX_LENGTH).tokens
    groups = torch.from_numpy(popularity_classes(frequencies.numpy()))
    lifts: dict[str, list[Tensor]] = {
        "clean": [attention_lift(model.attention(s)[0], s, groups)],
        "noisy": [],
        "corrected": [],
    }
    clean = {name: p.detach().clone() for name, p in model.named_parameters()}
    # sigma / B = noise / 100: an item in every hundredth sequence has an error of `noise`
    model.set_errors(noise, 100.0, frequencies, reach)
    variance = model.trace(s)[0].var
    assert variance is not None
    by_group = [float(variance[groups[s] == g].mean()) for g in range(3)]
    for _ in range(draws):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(clean[name] + torch.randn_like(p) * _std(model, name))
        lifts["corrected"].append(attention_lift(model.attention(s)[0], s, groups))
        model.reattention = None
        lifts["noisy"].append(attention_lift(model.attention(s)[0], s, groups))
        model.reattention = ReAttention()
    return {
        "lift": {name: torch.stack(draws_of).mean(0).tolist() for name, draws_of in lifts.items()},
        "lift_std": {name: torch.stack(draws_of).std(0, correction=0).tolist() for name, draws_of in lifts.items()},
        "variance": by_group,
    }


def _std(model: Transformer, name: str) -> Tensor:
    if name == "embedding.weight":
        return model.var_items.sqrt()[:, None]
    if name == "positions":
        return model.var_positions.sqrt()[:, None]
    return model.var_blocks.sqrt()


def _document_frequencies(sequences: Sequences, items: int) -> Tensor:
    held = np.zeros(items + 1)
    for sequence in sequences:
        held[np.unique(sequence)] += 1
    return torch.tensor(held / len(sequences), dtype=torch.float32)


def _train(model: Transformer, sequences: Sequences, steps: int, random: np.random.Generator) -> list[np.ndarray]:
    """Make a few ordinary steps, so that attention is not uniform."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    head, batches = TiedCrossEntropy(), []
    for _ in range(steps):
        users = random.choice(len(sequences), 256, replace=False)
        batches.append(users)
        tokens = collate(sequences, users, MAX_LENGTH + 1).tokens
        s, y = tokens[:, :-1], tokens[:, 1:]
        optimizer.zero_grad()
        weights = (y > 0) / (y > 0).sum(1, keepdim=True).clamp_min(1)
        head(model.states(s), model.table, y, weights.float(), model.output_bias).mean().backward()
        optimizer.step()
    return batches


def page(figures: dict[str, Any]) -> Page:
    """The figures as a table."""
    rows = []
    for norm, measured in figures["transformer"].items():
        for name, lift in measured["lift"].items():
            spread = measured["lift_std"][name]
            rows.append((f"{norm}-norm, {name}", *(f"{x:.2f} ± {e:.2f}" for x, e in zip(lift, spread, strict=True))))
        rows.append((f"{norm}-norm, tracked variance", *(f"{x:.2g}" for x in measured["variance"])))
    bias = figures["one_query"]
    note = (
        f"One query, 50 keys, half with noise: total variation from the true scores {bias['plain']:.3f} without correction, "
        f"{bias['corrected']:.3f} with, {bias['literal']:.3f} with the paper's formula."
    )
    title = "Attention / uniform attention, by popularity of the key"
    return Page(title, "dpformer reproduce attention -o docs/figures", ("", *GROUPS), rows, [note])


def draw(figures: dict[str, Any]) -> Figure:
    """Draw the paper's illustration from the measured scores, beside attention by popularity."""
    figure, grid = new_figure(1, 5, (17, 3.2))
    axes = grid[0]
    scores = {name: np.array(values)[:12] for name, values in figures["scores"].items()}
    titles = {"true": "without noise", "plain": "expected under noise", "corrected": "Re-Attention"}
    noisy = np.arange(12) % 2 == 0
    for axis, (name, title) in zip(axes[:3], titles.items(), strict=True):
        axis.bar(np.arange(12)[noisy], scores[name][noisy], color="#d95f02", label="noisy keys (tail)")
        axis.bar(np.arange(12)[~noisy], scores[name][~noisy], color="#1b9e77", label="quiet keys (head)")
        axis.set(title=title, xlabel="key", ylim=(0, 1.1 * max(s.max() for s in scores.values())))
    axes[0].set_ylabel("attention")
    axes[0].legend(frameon=False, fontsize=8)
    for axis, (norm, measured) in zip(axes[3:], figures["transformer"].items(), strict=True):
        for k, (name, colour) in enumerate({"clean": "#1b9e77", "noisy": "#d95f02", "corrected": "#7570b3"}.items()):
            axis.bar(np.arange(3) + 0.27 * (k - 1), measured["lift"][name], width=0.25, color=colour, label=name)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(title=f"{norm}-norm Transformer", ylabel="attention / uniform", xticks=range(3), xticklabels=GROUPS)
    axes[3].legend(frameon=False, fontsize=8)
    return figure
