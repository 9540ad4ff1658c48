"""What is done with a finished run: `show`, `privacy`, `report`, `export` and `serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dpformer.cli import output as screen
from dpformer.cli.options import AsJson, RunFolder
from dpformer.cli.output import print_json, say, stderr
from dpformer.errors import DPFormerError


def _opened(run: Path) -> dict[str, Any]:
    """The config of a run that is finished and whole."""
    from dpformer.artifact import check_files, check_version, read_config, refuse_unfinished

    config = read_config(run)
    check_version(run, config)
    refuse_unfinished(run)
    check_files(run)
    return config


def show(run: Annotated[Path, Argument(help="Folder of a run.")], as_json: AsJson = False) -> None:
    """Show a run: its state, its budget, its settings, its privacy statement."""
    from dpformer.artifact import read_config, read_spec, read_statement
    from dpformer.artifact.layout import LEDGER, OLD_FORMAT
    from dpformer.privacy import epsilon, read_ledger

    config = read_config(run)
    if config.get("version") == 1:  # nothing else opens such a folder
        recipe = config.get("recipe")
        if as_json:
            print_json({"run": str(run), "version": 1, "insecure": OLD_FORMAT, "recipe": recipe})
        else:
            settings = (f"{name}: {value}" for name, value in (recipe or {}).items())
            screen.show(f"INSECURE: {run} {OLD_FORMAT}.", *settings)
        return
    config, spec = _opened(run), read_spec(run)
    shown: dict[str, Any] = {"run": str(run), "finished": True, "items": spec.items, "recipe": config["recipe"]}
    lines = [f"{run}: {spec.name} over {spec.items:,} items, finished"]
    if (run / LEDGER).exists():
        ledger = read_ledger(run)
        plan, steps = ledger.plan, ledger.steps_charged
        spent = epsilon(ledger.spent(), plan.delta, plan.threshold_delta).epsilon if ledger.entries else 0.0
        shown["spent"] = {"epsilon": spent, "of": plan.epsilon, "delta": plan.delta}
        shown["steps"] = {"charged": steps, "planned": plan.steps}
        budget = f"epsilon {spent:.3f} of {plan.epsilon:g} at delta {plan.delta:g}"
        lines.append(f"charged: {steps} of {plan.steps} steps, {budget}")
    statement = read_statement(run)
    if as_json:
        print_json(shown | {"privacy": statement.model_dump(mode="json")})
    else:
        screen.show(*lines, statement.text())


def privacy(
    run: RunFolder,
    registry: Annotated[bool, Option("--registry", help="As an entry of a registry of deployments (JSON).")] = False,
    organisation: Annotated[str | None, Option(help="For the registry: who releases the model.")] = None,
    intended_use: Annotated[str | None, Option(help="For the registry: what it is released for.")] = None,
    justification: Annotated[str | None, Option(help="For the registry: why this epsilon and delta.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the privacy statement of a run, in words, as JSON, or as an entry of a public registry."""
    from dpformer.artifact import read_statement
    from dpformer.privacy.registry import registry_entry

    _opened(run)
    statement = read_statement(run)
    if registry:
        given = {"organisation": organisation, "intended_use": intended_use, "justification": justification}
        entry = registry_entry(statement, run.resolve().name, **given)
        print_json(entry)
        say(*(f"to fill in: --{name.replace('_', '-')}" for name in entry["to_fill_in"]))
    elif as_json:
        print_json(statement.model_dump(mode="json"))
    else:
        screen.show(statement.text())


def report(
    runs: Annotated[list[Path], Argument(help="Folders of finished runs; several are compared.")],
    output: Annotated[Path, Option("-o", "--output", help="The file to write.")] = Path("report.html"),
    history: Annotated[
        list[str] | None,
        Option(help="Ids or titles separated by commas: a history to show recommendations for; repeat for more."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about runs: accuracy with its protocol, privacy in plain words, plots. It needs no network."""
    from dpformer.files import write_file
    from dpformer.report import make_report

    with stderr.status("drawing ..."):
        made = make_report(runs, history or [])
    write_file(output, made.html.encode(), 0o600)
    if as_json:
        print_json({"report": str(output), "runs": made.figures()})
        return
    screen.show(f"written to {output}")
    for run in made.runs:
        if run.metrics is None and run.evaluated:
            say(f"{run.folder}: not evaluated; try: dpformer evaluate {run.folder}")
    say("it shows losses and metrics, which are not private: they are marked so")


def export(
    run: RunFolder,
    onnx: Annotated[bool, Option("--onnx", help="Write model.onnx.")] = False,
    torch_export: Annotated[bool, Option("--torch", help="Write model.pt2, for torch.export.load.")] = False,
    states: Annotated[
        bool, Option("--states", help="Of a network, write the hidden state and the item table in place of scores.")
    ] = False,
    triton: Annotated[
        bool, Option("--triton", help="With --onnx: lay the folder out as a model of NVIDIA Triton.")
    ] = False,
    output: Annotated[Path | None, Option("-o", "--output", help="Folder to write to; RUN/export by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Export a released model as a graph from histories to scores, with its catalogue and privacy statement."""
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
        screen.show(f"written to {folder}: {', '.join(names)}")


def serve(
    run: RunFolder,
    host: Annotated[str, Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    max_k: Annotated[int, Option(min=1, help="Largest k of a request.")] = 100,
    max_history: Annotated[int, Option(min=1, help="Most items of a history.")] = 1000,
    max_body: Annotated[int, Option(min=1, help="Largest body of a request, in bytes.")] = 1_000_000,
    timeout: Annotated[float, Option(min=0.01, help="Seconds that a request may take.")] = 5.0,
    watch: Annotated[
        bool, Option("--watch", help="Load the model again when the folder, or a link to it, changes.")
    ] = False,
    token_file: Annotated[
        Path | None,
        Option(
            help="File with a token that clients must send as 'authorization: Bearer TOKEN'; or set DPFORMER_TOKEN."
        ),
    ] = None,
    no_auth: Annotated[
        bool, Option("--no-auth", help="Serve without a token on an address that other machines reach.")
    ] = False,
    not_private: Annotated[
        bool, Option("--not-private", help="Serve even a model without a guarantee; the page says so.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="The address as JSON on stdout, once it is served.")] = False,
) -> None:
    """Serve recommendations: an API, and a page at /. The log goes to stderr as JSON lines, without histories.

    SIGHUP loads the folder again, without dropping a request.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DPFormerError(f"serving needs {error.name}: pip install 'dpformer[serve]'") from None
    from dpformer.serve.app import create_app
    from dpformer.serve.metrics import Metrics
    from dpformer.serve.ranker import load_for_serving
    from dpformer.serve.reload import Reloading
    from dpformer.serve.schema import Limits
    from dpformer.serve.server import address_of, open_socket, reaches_others, read_token, serve_until_stopped

    limits, metrics = Limits(body=max_body, history=max_history, k=max_k, timeout=timeout), Metrics()
    opened = open_socket(host, port)
    url, token = address_of(opened), read_token(token_file)
    if token is None and reaches_others(opened) and not no_auth:
        raise DPFormerError(
            f"{host} can be reached by other machines: set a token (--token-file, or DPFORMER_TOKEN), or pass --no-auth if a "
            "proxy in front of the server checks who asks"
        )
    app = Reloading(
        run, lambda folder: create_app(load_for_serving(folder, not_private, limits.k), limits, token, metrics), watch
    )

    def announce() -> None:
        if as_json:
            print_json({"url": url, "run": str(run), "token": token is not None})
            sys.stdout.flush()
        else:
            say(f"serving {run} at {url} (Ctrl-C stops it)")

    serve_until_stopped(app, opened, limits, announce)
