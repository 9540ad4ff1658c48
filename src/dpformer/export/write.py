"""The export folder: the graph, the item table beside it, the catalogue, the privacy statement, and how to use them.

model.onnx          history [B, L] and lengths [B] to state [B, d] or scores [B, items + 1]
model.pt2           the same for torch.export
table.safetensors   table [items + 1, d], bias [items + 1], popularity [items + 1] where it was released
items.jsonl, privacy.json, README.md
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
from torch import Tensor

from dpformer.artifact.artifact import Released, load_model
from dpformer.errors import DPFormerError
from dpformer.export.graphs import Graph, graph_of
from dpformer.files import write_file
from dpformer.fit.folder import ITEMS, PRIVACY

ONNX, PT2, TABLE = "model.onnx", "model.pt2", "table.safetensors"


def export_run(run: Path, folder: Path, onnx: bool = True, torch_export: bool = False) -> list[str]:
    """Write the export of a finished run; returns the names of the files."""
    released = load_model(run)
    graph = graph_of(released)
    program = _program(graph)
    files: dict[str, bytes] = {}
    if onnx:
        files[ONNX] = _onnx(program, graph)
    if torch_export:
        saved = io.BytesIO()
        with _quietly():
            torch.export.save(program, saved)
        files[PT2] = saved.getvalue()
    tensors = {"table": graph.table, "bias": graph.bias, "popularity": released.popularity}
    beside = {name: value.contiguous() for name, value in tensors.items() if value is not None}
    if beside:
        files[TABLE] = to_safetensors(beside)
    files |= {name: (run / name).read_bytes() for name in (ITEMS, PRIVACY)}
    files["README.md"] = _readme(released, graph, sorted(files)).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DPFormerError(f"{folder}: cannot be made ({error.strerror}); choose another with -o") from None
    for name, data in files.items():
        write_file(folder / name, data)
    return sorted(files)


def _program(graph: Graph) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    length: Any = torch.export.Dim("length", min=1) if graph.length is None else None
    shapes = {"history": {0: batch} | ({1: length} if length else {}), "lengths": {0: batch}}
    with _quietly(), torch.no_grad():
        program = torch.export.export(graph.module, graph.example(), dynamic_shapes=shapes, strict=False)
        return _decomposed(program)


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    table = torch.export.default_decompositions()
    table.update(_RUNNING)
    return program.run_decompositions(table)


def _onnx(program: torch.export.ExportedProgram, graph: Graph) -> bytes:
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
            output_names=[graph.output],
            verbose=False,
            external_data=False,
        )
    assert made is not None
    return made.model_proto.SerializeToString()


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
_RUNNING: dict[Any, Any] = {
    torch.ops.aten.cummax.default: _running_max,
    torch.ops.aten.cummin.default: _running_min,
}


def _readme(released: Released, graph: Graph, files: list[str]) -> str:
    """How to use the folder, and what its model promises."""
    pad = (
        f"exactly {graph.length} items (the last {graph.length} of a longer history)"
        if graph.length
        else "any number of items"
    )
    if graph.output == "state":
        output = "`state` `[B, d]`; the scores of all items are `state @ table.T + bias`"
        score = 'scores = state @ side["table"].T + side["bias"]'
        more = 'state = session.run(["state"], {"history": history, "lengths": lengths})[0]'
        cold = (
            "ranked by the released popularity, `popularity` in `table.safetensors`"
            if released.popularity is not None
            else ("ranked in the order of the catalogue: no popularity was released")
        )
        empty = f"The graph needs at least one known item; a history without one is {cold}."
        side = 'side = load_file("table.safetensors")\n'
        load = "from safetensors.numpy import load_file\n"
    else:
        output, side, load = "`scores` `[B, items + 1]`", "", ""
        score = 'scores = session.run(["scores"], {"history": history, "lengths": lengths})[0]'
        more, empty = "", "A history without a known item: one item of padding and length 0."
    padded = f"{graph.length} - len(known)" if graph.length else "0"
    cut = f"[-{graph.length}:]" if graph.length else ""
    listed = "".join(f"- `{name}`: {_FILES[name]}\n" for name in files)
    return f"""# {released.recipe.model}, exported by dpformer

{listed}
Inputs: `history` int64 `[B, L]`, item numbers as in the field `item` of `items.jsonl`, oldest first, {pad},
filled up with 0 at the end; `lengths` int64 `[B]`, how many of them are items.
Output: {output}. Number 0 is padding and has score -inf. Leave
items of the history out before taking the best k. {empty}

```python
import numpy as np
import onnxruntime
import polars as pl
{load}
items = pl.read_ndjson("items.jsonl", infer_schema_length=None)
{side}session = onnxruntime.InferenceSession("model.onnx")
known = [1, 2]{cut}  # item numbers
history = np.pad(np.array([known], dtype=np.int64), ((0, 0), (0, {padded})))
lengths = np.array([len(known)], dtype=np.int64)
{more + chr(10) if more else ""}{score}
scores[0, known] = -np.inf
best = np.argsort(-scores[0], kind="stable")[:10]
print(items[best - 1].with_columns(score=scores[0, best]))
```

## Privacy

An export is a function of the released model alone, so it is covered by the same statement:

{released.statement.text()}
"""


_FILES = {
    ONNX: "the graph, for ONNX Runtime and others",
    PT2: "the same graph for `torch.export.load`. The format holds a pickle (of the example inputs): load "
    "only a .pt2 from somebody whom you trust to run code. The other files hold none",
    TABLE: "the output table and bias of all items, and their released popularity where there is one",
    ITEMS: "the catalogue",
    PRIVACY: "the privacy statement",
}


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporters talk of their own insides; errors still come through."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
