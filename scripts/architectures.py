"""Write the table of architectures in docs/clipping.md: Phantom Clipping and Opacus against one sample at a time.

python scripts/architectures.py            # a minute on one core
python scripts/architectures.py GPT-2 T5   # print these rows only
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import opacus  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from dpformer.errors import ClippingError  # noqa: E402
from tests.clipping.architectures import ALL, Architecture, error_of, per_sample  # noqa: E402

BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
EXACT = 1e-6


def ours(one: Architecture, attention: str, padded: bool) -> float | str:
    """The error, or what the refusal says."""
    torch.manual_seed(0)
    try:
        return error_of(one, attention, padded)
    except ClippingError as refusal:
        return str(refusal)


def opacus_error(one: Architecture, attention: str, padded: bool) -> float | str:
    """The largest relative error of the norms by Opacus' hooks (GradSampleModule), or the kind of error that it raises."""
    torch.manual_seed(0)
    model, batch = one.make(attention), one.batch(padded)
    for all_parts in (True, False):  # its hooks work in training mode only
        for part in model.modules():
            still = isinstance(part, (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd))
            own = any(True for _ in part.parameters(recurse=False))
            part.training = not still and (all_parts or own)
        norms, gradients = per_sample(model, one, batch)
        if torch.equal(norms, per_sample(model, one, batch)[0]):
            break  # else there is dropout outside of layers of dropout
    try:
        hooked = opacus.GradSampleModule(model, loss_reduction="sum", strict=True)
        one.losses(hooked, batch).sum().backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        samples = [getattr(p, "grad_sample", None) for p in parameters]
        if any(g is None and any(own[k].any() for own in gradients) for k, g in enumerate(samples)):
            return "no gradient"  # its optimiser raises; a parameter without a use could be frozen
        samples = [g for g in samples if g is not None]
        theirs = torch.stack([g.double().flatten(1).norm(dim=1) for g in samples]).norm(dim=0)
        return float((theirs / norms - 1).abs().max()) if theirs.shape == norms.shape else "wrong number of samples"
    except Exception as error:  # noqa: BLE001  (what it raises is the result)
        return type(error).__name__


def row(one: Architecture) -> tuple[str, bool, str]:
    """The line of the table, whether ours is exact in all variants, and what Opacus' outcome is in one word."""
    variants = [(attention, padded) for attention in one.attentions for padded in one.paddings]
    errors = [ours(one, *variant) for variant in variants]
    refusals = [x for x in errors if isinstance(x, str)]
    worst = max((x for x in errors if isinstance(x, float)), default=0.0)
    exact = not refusals and worst < EXACT
    mine = (
        f"{worst:.0e}" if exact else f"refused: {refusals[0].split(':')[0]}" if refusals else f"**wrong, {worst:.0e}**"
    )
    theirs = [opacus_error(one, *variant) for variant in variants]
    raised = [x for x in theirs if isinstance(x, str)]
    off = max((x for x in theirs if isinstance(x, float)), default=0.0)
    word = "wrong" if off >= 1e-4 else "refused" if raised else "exact"
    opacus_says = {
        "wrong": f"**wrong by {100 * off:.2g} %**",
        "refused": f"refused ({', '.join(sorted(set(raised)))})",
        "exact": f"{off:.0e}",
    }
    about = ", ".join(one.attentions) if one.attentions != ("none",) else "its own"
    padding = "with and without" if len(one.paddings) == 2 else "without"
    return f"| {one.name} | {one.domain} | {about} | {padding} | {mine} | {opacus_says[word]} |", exact, word


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = [one for one in ALL if not sys.argv[1:] or any(name in one.name for name in sys.argv[1:])]
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    lines, exact, words = zip(*(row(one) for one in chosen), strict=True)
    text = [
        f"Of {len(chosen)} architectures Phantom Clipping is exact on {sum(exact)} and refuses {len(chosen) - sum(exact)}; "
        f"Opacus {opacus.__version__} (hooks) is exact on {words.count('exact')}, refuses {words.count('refused')}, and is wrong "
        f"without a word on {words.count('wrong')} ({versions}).",
        "",
        "| architecture | domain | attention | padding | Phantom Clipping | Opacus, hooks |",
        "|---|---|---|---|---|---|",
        *lines,
    ]
    print("\n".join(text))
    if len(chosen) == len(ALL):
        page = ROOT / "docs" / "clipping.md"
        before, rest = page.read_text().split(BEGIN)
        page.write_text(before + BEGIN + "\n" + "\n".join(text) + "\n\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
