"""`dpformer serve`: a released model behind HTTP, with a page to try it."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    max_k: Annotated[int, typer.Option(min=1, help="Largest k of a request.")] = 100,
    max_history: Annotated[int, typer.Option(min=1, help="Most items of a history.")] = 1000,
    max_body: Annotated[int, typer.Option(min=1, help="Largest body of a request, in bytes.")] = 1_000_000,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that a request may take.")] = 5.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Load the model again when the folder, or a link to it, changes.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a token that clients must send as 'authorization: Bearer TOKEN'; or set DPFORMER_TOKEN."
        ),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Serve without a token on an address that other machines reach.")
    ] = False,
    not_private: Annotated[
        bool, typer.Option("--not-private", help="Serve even a model without a guarantee; the page says so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The address as JSON on stdout, once it is served.")] = False,
) -> None:
    """Serve recommendations: an API, and a page at /. The log goes to stderr as JSON lines, without histories.

    SIGHUP loads the folder again, without dropping a request.
    """
    import sys

    from dpformer.cli.output import print_json, stderr
    from dpformer.errors import DPFormerError

    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DPFormerError(f"serving needs {error.name}: pip install 'dpformer[serve]'") from None
    from dpformer.serve.app import create_app
    from dpformer.serve.limits import Limits
    from dpformer.serve.metrics import Metrics
    from dpformer.serve.ranker import load_for_serving
    from dpformer.serve.reload import Reloading
    from dpformer.serve.server import address_of, open_socket, reaches_others, read_token, serve_until_stopped

    limits, metrics = Limits(body=max_body, history=max_history, k=max_k, timeout=timeout), Metrics()
    opened = open_socket(host, port)
    url = address_of(opened)
    token = read_token(token_file)
    if token is None and reaches_others(opened) and not no_auth:
        raise DPFormerError(
            f"{host} can be reached by other machines: set a token (--token-file, or DPFORMER_TOKEN), or pass --no-auth if a "
            "proxy in front of the server checks who asks"
        )
    app = Reloading(
        run, lambda folder: create_app(load_for_serving(folder, not_private, limits.k), limits, token, metrics), watch
    )

    def say() -> None:
        if as_json:
            print_json({"url": url, "run": str(run), "token": token is not None})
            sys.stdout.flush()
        else:
            stderr.print(f"serving {run} at {url} (Ctrl-C stops it)", markup=False, soft_wrap=True)

    serve_until_stopped(app, opened, limits, say)
