"""The examples in README.md and docs/ are run, in order, one temporary folder a page.

In a fenced `console` block, lines that begin with `$ ` (or, without any such line, with `dpformer `) are run by the
shell, and what else the block shows must be in their output; `...` stands for anything. A `python` block is a program
of its own. Comments directly before a block change that: `<!-- file: NAME -->` writes it to a file,
`<!-- not run: REASON -->` leaves it alone, and `<!-- in the background until: TEXT -->` lets its one command run on to
the end of the page, from where TEXT is printed; port 8000 is another, free one.
"""

import importlib
import os
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import dpformer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>file|not run|in the background until): (?P<what>.+?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    mark: str | None
    what: str | None
    body: str


def blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, found.start()) + 1, found["language"], found["mark"], found["what"], found["body"])
        for found in _BLOCK.finditer(text)
    ]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_console(body: str, folder: Path) -> None:
    lines = body.splitlines()
    prompt = "$ " if any(line.startswith("$ ") for line in lines) else ""
    commands = [line.removeprefix(prompt) for line in lines if line.startswith(prompt or "dpformer ")]
    shown = [line.strip() for line in lines if prompt and not line.startswith(prompt)]
    assert commands, "a console block without commands"
    output = "\n".join(run(["bash", "-c", command], folder) for command in commands)
    printed = {line.strip() for line in output.splitlines()}
    for line in shown:
        assert line in printed or line in ("", "..."), f"not printed: {line}\n{output}"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def in_the_background(command: str, until: str, folder: Path) -> Iterator[None]:
    log = folder / ".background"
    with open(log, "w") as out:
        words = shlex.split(command)
        process = subprocess.Popen(words, cwd=folder, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            if until in log.read_text():
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        assert until in log.read_text(), f"not printed: {until}\n{log.read_text()}"
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path):
    with ExitStack() as running:
        run_page(page, tmp_path, running)


def run_page(page: Path, tmp_path: Path, running: ExitStack) -> None:
    text, port = page.read_text(), 0
    if "<!-- in the background until" in text:
        port = free_port()
        text = text.replace(":8000", f":{port}")
    for block in blocks(text):
        try:
            if block.mark == "in the background until":
                (command,) = (line.removeprefix("$ ") for line in block.body.splitlines())
                running.enter_context(in_the_background(f"{command} --port {port}", str(block.what), tmp_path))
            elif block.mark == "file":
                (tmp_path / str(block.what)).write_text(block.body)
            elif block.mark is None and block.language == "console":
                run_console(block.body, tmp_path)
            elif block.mark is None and block.language == "python":
                run([sys.executable, "-c", block.body], tmp_path)
        except AssertionError as error:
            pytest.fail(f"{page.name}, line {block.line}: {error}")


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```console\n$ echo one\ntwo\n```", "not printed: two"),
        ("```console\n$ false\n```", ""),
        ("```python\nassert 1 == 2\n```", "AssertionError"),
        ("```console\njust text\n```", "without commands"),
        ("<!-- in the background until: ready -->\n```console\n$ false\n```", ""),
    ],
)
def test_a_wrong_example_is_found(page: str, complaint: str, tmp_path: Path):
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(pytest.fail.Exception, match=f"line 1: (.|\n)*{complaint}"):
        test_examples_run(tmp_path / "page.md", tmp_path)


def test_a_block_can_be_left_alone_with_a_reason(tmp_path: Path):
    (tmp_path / "page.md").write_text("<!-- not run: would fail -->\n```console\n$ false\n```\n")
    test_examples_run(tmp_path / "page.md", tmp_path)


def test_the_api_pages_list_exactly_what_each_room_exports():
    """A name is listed by the room or by its module in it: `dpformer.privacy.plan.make_plan` is of `dpformer.privacy`."""
    listed = re.findall(
        r"^::: dpformer\.(\S+)$", "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md")), re.M
    )
    rooms = [
        *(found.name for found in pkgutil.iter_modules(dpformer.__path__) if found.ispkg),
        "trust.verify",
        "trust.audit",
    ]
    for room in rooms:
        exported = getattr(importlib.import_module(f"dpformer.{room}"), "__all__", None)
        if exported is not None:
            names = [name.rpartition(".")[2] for name in listed if name.startswith(f"{room}.")]
            assert sorted(names) == sorted(exported), room
    for name in listed:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(f"dpformer.{module}"), last), name
