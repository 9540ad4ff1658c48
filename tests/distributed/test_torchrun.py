"""The real torchrun with the real command line: a killed worker, and two machines that are network namespaces."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpformer.privacy import read_ledger
from tests.distributed.conftest import begun, free_port
from tests.recipes import small_recipe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Everybody is in every batch: a plan that needs no numerical accounting. Slow steps, to be killed in one.
SETTINGS = ("batch_size=60", "epochs=30", "d=8", "blocks=1", "max_length=10")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def fit(data: Path, folder: Path) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    budget = ["--preset", "pure", "--epsilon", "20", "--delta", "0.001", "--seed", "3"]
    return ["-m", "dpformer", "fit", str(data), "-o", str(folder), *budget, *settings, "--quiet"]


def workers(agent: int) -> list[int]:
    found = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return sorted(int(pid) for pid in found if b"dpformer" in Path(f"/proc/{pid}/cmdline").read_bytes())


def is_rank(pid: int, rank: int) -> bool:
    return f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers of torchrun in /proc")
def test_processes_that_torchrun_starts_again_end_and_resume_goes_on(tmp_path, data):
    """The machine whose worker was killed counts a restart, and the other one perhaps does not. No start pays twice."""
    folder = tmp_path / "run"
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "test"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", *place, *fit(data, folder)]
    with open(tmp_path / "log", "w") as log:
        agents = [subprocess.Popen(command, env=environment(), stderr=log, stdout=log) for _ in range(2)]
    try:
        events, end = folder / "events.jsonl", time.monotonic() + 200
        while time.monotonic() < end and not (events.exists() and events.read_bytes().count(b"\n") >= 3):
            assert [agent.poll() for agent in agents] == [None, None], (tmp_path / "log").read_text()
            time.sleep(0.005)
        (other,) = (pid for agent in agents for pid in workers(agent.pid) if is_rank(pid, 1))
        os.kill(other, signal.SIGKILL)
        assert 0 not in [agent.wait(300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    said = (tmp_path / "log").read_text()
    assert "torchrun has started rank" in said
    assert "go on with `dpformer resume RUN` at no cost" in said
    charged = read_ledger(folder).steps_charged
    assert 3 <= charged < read_ledger(folder).plan.steps
    assert not (folder / "model.safetensors").exists()
    command = [sys.executable, "-m", "dpformer", "resume", str(folder), "--quiet"]
    subprocess.run(command, env=environment(), capture_output=True, timeout=300, check=True)
    account = read_ledger(folder)
    assert account.steps_charged == account.plan.steps == events.read_bytes().count(b"\n") == 30
    assert (folder / "model.safetensors").exists()
    assert not (folder / "private").exists()


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.77.x.1 and 10.77.x.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (iproute2)")
    names = [f"dpformer-{os.getpid()}-{k}" for k in (1, 2)]
    cable = [f"dpf{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for k, name in enumerate(names):
            _ip("link", "set", cable[k], "netns", name, "name", "cable")
            _ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"network namespaces are not permitted here: {refused.stderr.strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", cable[0]], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def test_two_machines_meet_and_train(tmp_path, data, hosts):
    folder = begun(tmp_path / "run", data, small_recipe(histogram=False, batch_size=60, epochs=5.0))
    agents = []
    for rank, host in enumerate(hosts):
        meeting = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.77.0.1", "--master-port", "29511"]
        command = [*TORCHRUN, *meeting, "--nproc-per-node", "1", "-m", "dpformer", "resume", str(folder), "--quiet"]
        place = environment(GLOO_SOCKET_IFNAME="cable")
        agents.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                env=place,
                stderr=subprocess.STDOUT,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "differential privacy for one user" in said[0]
    assert "differential privacy" not in said[1]  # rank 0 alone talks
    assert read_ledger(folder).steps_charged == 5
    assert (folder / "model.safetensors").exists()
