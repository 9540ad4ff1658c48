"""Serve a folder of `dpformer export RUN --onnx` with ONNX Runtime and the standard library: no torch, no dpformer.

    pip install onnxruntime
    python onnx_server.py FOLDER [PORT]
    curl -d '{"history": ["104", "112"], "k": 3}' localhost:PORT/recommend

A small example: put a real server and a token in front of it before other machines can reach it.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

LONGEST, MOST = 100_000, 100


class Model:
    """The graph and the catalogue."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        self.items = [json.loads(line) for line in (folder / "items.jsonl").read_text(encoding="utf-8").splitlines()]
        self.number = {str(item["item_id"]): item["item"] for item in self.items}

    def recommend(self, history: list[str], k: int) -> list[dict[str, Any]]:
        """The best k items that are not in the history."""
        known = [self.number[name] for name in map(str, history) if name in self.number]
        tokens = np.array([known or [0]], dtype=np.int64)
        scores = self.session.run(["scores"], {"history": tokens, "lengths": np.array([len(known)], dtype=np.int64)})[
            0
        ][0]
        scores[known] = -np.inf
        best = np.argsort(-scores, kind="stable")[: min(k, MOST)]
        return [self.items[n - 1] | {"score": float(scores[n])} for n in best if np.isfinite(scores[n])]


def handler(model: Model) -> type[BaseHTTPRequestHandler]:
    """The class that answers requests with this model."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(min(int(self.headers.get("content-length", 0)), LONGEST)))
                answer: dict[str, Any] = {"items": model.recommend(body["history"], int(body.get("k", 10)))}
                # Shown here because it is the point of the example.
                answer["imported"] = [name for name in ("torch", "dpformer") if name in sys.modules]
                status = 200
            except (ValueError, KeyError, TypeError):
                status, answer = 422, {"detail": 'send {"history": ["id", ...], "k": 10}'}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            """No log: a request holds a person's history."""

    return Handler


def main(folder: str, port: str = "0") -> None:
    """Serve on this machine until stopped."""
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), handler(Model(Path(folder))))
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}, indent=2), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
