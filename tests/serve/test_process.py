"""`dpformer serve` as a process: concurrent clients, slow ones, and a graceful stop."""

import concurrent.futures
import json
import re
import signal
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.conftest import start


def test_concurrent_clients_share_passes_and_a_stop_answers_what_is_under_way(served):
    with httpx.Client(base_url=served.url) as client, concurrent.futures.ThreadPoolExecutor(16) as pool:
        body = {"histories": [["i03", "secret-item"]], "k": 3}
        answers = list(pool.map(lambda _: client.post("/recommend", json=body), range(200)))
        assert {answer.status_code for answer in answers} == {200}
        items = [answer.json()["rankings"][0]["items"] for answer in answers]
        assert {tuple(item["item_id"] for item in ranked) for ranked in items} == {
            tuple(item["item_id"] for item in items[0])
        }
        text = client.get("/metrics").text
        passes = float(re.search(r"^dpformer_batch_histories_count (\S+)$", text, re.M)[1])
        assert 0 < passes <= 200  # that passes are shared is tested without a clock in test_api
        late = [pool.submit(client.post, "/recommend", json=body) for _ in range(16)]
        time.sleep(0.05)
        code = served.stop(signal.SIGTERM)
        done = [future.result() for future in late if future.exception() is None]
    assert code == 0
    assert all(answer.status_code == 200 for answer in done)
    lines = served.lines()
    assert lines[-1]["event"] == "stopped"
    assert sum(line["event"] == "request" for line in lines) >= 201
    assert "secret-item" not in served.log.read_text()


def test_a_client_that_dawdles_is_sent_away_and_harms_nobody(run, tmp_path):
    served = start(run, tmp_path / "log", "--timeout", "0.3", "--max-k", "7")
    try:
        port = urlsplit(served.url).port
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
            answer = httpx.post(f"{served.url}/recommend", json={"histories": [[]], "k": 8})
            assert answer.status_code == 422
            slow.settimeout(10)
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        assert httpx.get(f"{served.url}/healthz").status_code == 200
        assert served.stop(signal.SIGINT) == 0
    finally:
        served.process.kill()
        served.process.wait()
    assert {408, 422, 200} <= {line.get("status") for line in served.lines()}


def test_a_port_that_is_taken(run, dpformer):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = dpformer("serve", run, "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "choose another with --host and --port" in done.err


def test_only_this_machine_is_served_by_default(served):
    assert urlsplit(served.url).hostname == "127.0.0.1"
    assert json.loads(httpx.get(f"{served.url}/healthz").text)["status"] == "ok"
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url.replace("127.0.0.1", "127.0.0.2"))
