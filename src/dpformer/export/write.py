"""The export folder: the model as a graph, the catalogue, the privacy statement, and how to use them.

model.onnx          history [B, L] and lengths [B] to scores [B, items + 1], for any B and L
model.pt2           the same for torch.export
items.jsonl, privacy.json, README.md

With `triton` the folder is a model in a repository of NVIDIA Triton: 1/model.onnx and config.pbtxt.
With `states` the graph of a network ends before its table, so that you can do the top-k search yourself: it gives the state
[B, d], and `table.safetensors` has the table [items + 1, d] and the bias [items + 1] (and the released popularity).
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from dpformer.artifact import Artifact, load
from dpformer.artifact.layout import ITEMS, PRIVACY
from dpformer.errors import DPFormerError
from dpformer.files import write_file
from dpformer.models import Network, Recommender

ONNX, PT2, TABLE = "model.onnx", "model.pt2", "table.safetensors"
TRITON, TRITON_ONNX = "config.pbtxt", "1/model.onnx"


def export_run(
    run: Path, folder: Path, onnx: bool = True, torch_export: bool = False, states: bool = False, triton: bool = False
) -> list[str]:
    """Write the export of a finished run.

    Args:
        run: folder of a finished run.
        folder: where to write.
        onnx: write model.onnx.
        torch_export: write model.pt2.
        states: end the graph at the hidden state, for models that are one network.
        triton: with `onnx`, lay the folder out for NVIDIA Triton.

    Returns:
        The names of the files.
    """
    artifact = load(run)
    files: dict[str, bytes] = {}
    module: nn.Module = artifact.model
    width = artifact.item_count + 1
    if states:
        network = _whole_network(artifact.model)
        module, files[TABLE], width = LastState(network), _table(network), network.spec.d
    program = graph_of(module)
    output = "state" if states else "scores"
    if onnx:
        files[TRITON_ONNX if triton else ONNX] = _onnx(program, output)
    if onnx and triton:
        files[TRITON] = _triton(output, width)
    if torch_export:
        saved = io.BytesIO()
        with _quietly():
            torch.export.save(program, saved)
        files[PT2] = saved.getvalue()
    files |= {name: (run / name).read_bytes() for name in (ITEMS, PRIVACY)}
    files["README.md"] = _readme(artifact, states, sorted(files)).encode()
    try:
        (folder / (Path(TRITON_ONNX).parent if triton else ".")).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DPFormerError(f"{folder}: cannot be made ({error.strerror}); choose another with -o") from None
    for name, data in files.items():
        write_file(folder / name, data)
    return sorted(files)


class LastState(nn.Module):
    """History `[B, L]` and lengths `[B]` to the hidden state after the last item, `[B, d]`."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        return self.network.last_state(history, lengths)


def graph_of(module: nn.Module) -> torch.export.ExportedProgram:
    """The graph of a model, in evaluation mode, for any batch size and any length of histories."""
    module = module.eval().requires_grad_(False)
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    shapes = {"history": {0: batch, 1: length}, "lengths": {0: batch}}
    example = (torch.ones(2, 3, dtype=torch.int64), torch.full((2,), 2))
    with _quietly(), torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
        table = torch.export.default_decompositions()
        table.update(_RUNNING)
        return program.run_decompositions(table)


def _whole_network(model: Recommender) -> Network:
    if not isinstance(model, Network):
        raise DPFormerError(
            f"states are for a model that is one network, not for {model.spec.name!r}: export the scores, or fit with "
            "--preset dpformer"
        )
    return model


def _table(network: Network) -> bytes:
    """Table and bias of all items: those outside of a vocabulary have zeros."""
    table = network.table.detach()
    if network.chosen is not None:
        table = table.new_zeros(network.spec.items + 1, table.shape[1]).index_copy(0, network.chosen, table)
    tensors = {"table": table, "bias": network.output_bias, "popularity": network.popularity()}
    return to_safetensors({name: value.contiguous() for name, value in tensors.items() if value is not None})


def _onnx(program: torch.export.ExportedProgram, output: str) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise DPFormerError(f"ONNX needs {error.name}: pip install 'dpformer[onnx]'") from None
    with _quietly():
        made = torch.onnx.export(
            program,
            (),
            dynamo=True,
            input_names=["history", "lengths"],
            output_names=[output],
            verbose=False,
            external_data=False,
        )
    assert made is not None
    return made.model_proto.SerializeToString()


def _triton(output: str, width: int) -> bytes:
    """The configuration of the model. Tensors have their batch dimension, so Triton adds none; the name is that of the folder."""
    tensors = {"history": "[ -1, -1 ]", "lengths": "[ -1 ]"}
    inputs = ",\n".join(
        f'  {{ name: "{name}", data_type: TYPE_INT64, dims: {dims} }}' for name, dims in tensors.items()
    )
    outputs = f'  {{ name: "{output}", data_type: TYPE_FP32, dims: [ -1, {width} ] }}'
    return f'backend: "onnxruntime"\nmax_batch_size: 0\ninput [\n{inputs}\n]\noutput [\n{outputs}\n]\n'.encode()


def _running_max(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`torch.cummax` over the last dimension, which ONNX does not have, as a maximum over a triangle `[..., L, L]`."""
    if dim not in (-1, x.dim() - 1):
        raise NotImplementedError(f"a running maximum over dimension {dim}")
    later = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).triu(1)
    best = x[..., None, :].masked_fill(later, -torch.inf).max(-1)
    return best.values, best.indices


def _running_min(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`torch.cummin`, likewise."""
    values, indices = _running_max(-x, dim)
    return -values, indices


# Re-Attention's cap needs them.
_RUNNING: dict[Any, Any] = {torch.ops.aten.cummax.default: _running_max, torch.ops.aten.cummin.default: _running_min}


def _readme(artifact: Artifact, states: bool, files: list[str]) -> str:
    """How to use the folder, and what its model promises."""
    if states:
        output = "`state` `[B, d]`; the scores of all items are `state @ table.T + bias`"
        load_lines = 'from safetensors.numpy import load_file\n\nside = load_file("table.safetensors")'
        score = """state = session.run(["state"], {"history": history, "lengths": lengths})[0]
scores = state @ side["table"].T + side["bias"]"""
        empty = (
            "the order of the catalogue: no popularity was released"
            if artifact.model.popularity() is None
            else "the released popularity, `popularity` in `table.safetensors`"
        )
        empty = f"The state says nothing about an empty history: rank by {empty}."
    else:
        output, load_lines = "`scores` `[B, items + 1]`", ""
        score = 'scores = session.run(["scores"], {"history": history, "lengths": lengths})[0]'
        empty = f"An empty history, one item of padding and length 0, is ranked by {artifact.cold_start}."
    listed = "".join(f"- `{name}`: {_FILES[name]}\n" for name in files)
    return f"""# {artifact.model.spec.name}, exported by dpformer

{listed}
Inputs: `history` int64 `[B, L]`, item numbers as in the field `item` of `items.jsonl`, oldest first, any number of items,
filled up with 0 at the end; `lengths` int64 `[B]`, how many of them are items.
Output: {output}. Number 0 is padding and has score -inf. Leave
items of the history out before taking the best k. {empty}

```python
import numpy as np
import onnxruntime
import polars as pl
{load_lines}
items = pl.read_ndjson("items.jsonl", infer_schema_length=None)
session = onnxruntime.InferenceSession("{TRITON_ONNX if TRITON in files else ONNX}")
seen = [1, 2]  # item numbers
history = np.array([seen], dtype=np.int64)
lengths = np.array([len(seen)], dtype=np.int64)
{score}
scores[0, seen] = -np.inf
best = np.argsort(-scores[0], kind="stable")[:10]
print(items[best - 1].with_columns(score=scores[0, best]))
```

## Privacy

An export is a function of the released model alone, so it is covered by the same statement:

{artifact.statement.text()}
"""


_GRAPH = "the graph, for ONNX Runtime and others"
_FILES = {
    ONNX: _GRAPH,
    TRITON_ONNX: _GRAPH,
    TRITON: "the configuration for NVIDIA Triton: this folder is a model of its repository",
    PT2: "the same graph for `torch.export.load`. The format holds a pickle (of the example inputs): load "
    "a .pt2 only if you trust its author to run code on your machine. The other files hold none",
    TABLE: "the output table and bias of all items, and their released popularity where there is one",
    ITEMS: "the catalogue",
    PRIVACY: "the privacy statement",
}


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporters' warnings; errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
