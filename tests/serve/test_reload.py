"""A model that is exchanged while it is served."""

import asyncio
import os
import shutil
import signal
import threading
import time

import httpx
import pytest

from dpformer.errors import DPFormerError
from dpformer.fit.run import start as start_run
from dpformer.serve.app import create_app
from dpformer.serve.ranker import load_for_serving
from dpformer.serve.reload import Reloading
from dpformer.serve.server import read_token
from tests.recipes import plain_recipe
from tests.serve.conftest import start


@pytest.fixture(scope="module")
def second(run, tmp_path_factory):
    """Another model of the same data."""
    folder = tmp_path_factory.mktemp("second") / "run"
    recipe = plain_recipe(epsilon=10.0, delta=1e-3, d=8, max_length=6, epochs=2.0)
    opened = start_run(folder, run.parent / "data", recipe)
    assert opened.train()
    opened.close()
    return folder


def wait_for(condition, seconds: float = 60.0) -> None:
    """Until a condition holds; the bound is for a hanging server, not a measurement."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["watch", "hangup"])
def test_no_request_is_dropped_while_the_model_changes(run, second, tmp_path, how):
    link = tmp_path / "current"
    link.symlink_to(run)
    served = start(link, tmp_path / "log", *(["--watch"] if how == "watch" else []))
    statuses, over = [], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            while not over.is_set():
                statuses.append(client.post("/recommend", json={"histories": [["i03"]], "k": 2}).status_code)

    def name() -> str:
        return httpx.get(f"{served.url}/version", timeout=60).json()["sha256"]

    askers = [threading.Thread(target=ask) for _ in range(3)]
    try:
        before = name()
        for asker in askers:
            asker.start()
        aside = tmp_path / "next"
        aside.symlink_to(second)
        os.replace(aside, link)
        if how == "hangup":
            served.process.send_signal(signal.SIGHUP)
        wait_for(lambda: name() != before)
        more = len(statuses) + 20
        wait_for(lambda: len(statuses) >= more)
    finally:
        over.set()
        for asker in askers:
            asker.join()
        code = served.stop()
    assert code == 0
    assert set(statuses) == {200}
    assert "reloaded" in [line["event"] for line in served.lines()]


def test_a_folder_that_is_refused_leaves_the_old_model(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)

    async def scenario() -> list[bool]:
        app = Reloading(folder, lambda path: create_app(load_for_serving(path)))
        transport = httpx.ASGITransport(app)
        messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        sent: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        messages.put_nowait({"type": "lifespan.startup"})
        life = asyncio.create_task(app({"type": "lifespan"}, messages.get, sent.put))
        await sent.get()
        (folder / "privacy.json").write_text("{}")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            outcomes = [await app.reload(), (await client.get("/version")).status_code == 200]
            shutil.copy(run / "privacy.json", folder / "privacy.json")
            outcomes.append(await app.reload())
        messages.put_nowait({"type": "lifespan.shutdown"})
        await life
        return outcomes

    assert asyncio.run(scenario()) == [False, True, True]


def test_an_open_address_wants_a_token(run, dpformer, tmp_path, monkeypatch):
    monkeypatch.delenv("DPFORMER_TOKEN", raising=False)
    done = dpformer("serve", run, "--host", "0.0.0.0", "--port", "0")
    assert done.code == 2
    assert "--token-file" in done.err
    assert "--no-auth" in done.err


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DPFORMER_TOKEN", raising=False)
    assert read_token(None) is None
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    assert read_token(file) == "0123456789abcdef"
    monkeypatch.setenv("DPFORMER_TOKEN", "short")
    with pytest.raises(DPFormerError, match="at least 16"):
        read_token(None)
