"""A served run: made once, in this process and in one of its own."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("httpx", reason="needs httpx")

from dpformer.data import prepare, save
from dpformer.fit.run import start as start_run
from tests.fit.conftest import small_log
from tests.recipes import plain_recipe


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A small private run, with noise from the system."""
    folder = tmp_path_factory.mktemp("served")
    save(prepare(small_log(), title="title"), folder / "data")
    recipe = plain_recipe(epsilon=20.0, delta=1e-3, d=8, max_length=6, epochs=2.0)
    opened = start_run(folder / "run", folder / "data", recipe)
    assert opened.train()
    opened.close()
    return folder / "run"


@dataclass
class Served:
    """`dpformer serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def start(run: Path, log: Path, *options: str) -> Served:
    command = [sys.executable, "-m", "dpformer", "serve", str(run), "--port", "0", "--json", *options]
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    text = ""
    while ready and not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, log.read_text()
        text += line
    return Served(process, json.loads(text)["url"], log)


@pytest.fixture
def served(run, tmp_path) -> Iterator[Served]:
    found = start(run, tmp_path / "log")
    yield found
    found.process.kill()
    found.process.wait()
