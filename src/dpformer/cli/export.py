"""`dpformer export`: a released model for other runtimes."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx.")] = False,
    torch_export: Annotated[bool, typer.Option("--torch", help="Write model.pt2, for torch.export.load.")] = False,
    states: Annotated[
        bool,
        typer.Option("--states", help="Of a network, write the hidden state and the item table in place of scores."),
    ] = False,
    triton: Annotated[
        bool, typer.Option("--triton", help="With --onnx: lay the folder out as a model of NVIDIA Triton.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write to; RUN/export by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON on stdout.")] = False,
) -> None:
    """Export a released model as a graph from histories to scores, with its catalogue and privacy statement."""
    from dpformer.cli.output import print_json, stdout
    from dpformer.errors import DPFormerError
    from dpformer.export import export_run

    if not (onnx or torch_export):
        raise DPFormerError("choose a format: --onnx, --torch, or both")
    if triton and not onnx:
        raise DPFormerError("--triton is for ONNX: give --onnx --triton")
    folder = output or run / "export"
    names = export_run(run, folder, onnx, torch_export, states, triton)
    if as_json:
        print_json({"folder": str(folder), "files": names})
    else:
        stdout.print(f"written to {folder}: {', '.join(names)}", markup=False, soft_wrap=True)
