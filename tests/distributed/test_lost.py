"""A process that is lost, hangs or differs ends the run with its name; the ledger never says less than was released."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dpformer.errors import DPFormerError
from dpformer.fit import lead_and_follow
from dpformer.fit.dpsgd import Trainer
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.lead_and_follow import follow
from dpformer.fit.run import resume
from dpformer.privacy import read_ledger
from dpformer.training.ranks import Ranks
from tests.distributed.conftest import begun, copied, fork_ranks, train_on
from tests.recipes import small_recipe


def steps_seen(folder: Path) -> int:
    return len((folder / "events.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data) -> Path:
    """Two processes, uninterrupted."""
    folder = begun(tmp_path_factory.mktemp("whole") / "whole", data, small_recipe(dropout=0.2))
    return folder


@pytest.fixture
def same_bits(whole, loaded, tmp_path):
    """Trains an untouched copy by two processes, and compares."""

    def compare(folder: Path) -> None:
        expected = copied(whole, f"{whole.name}-{os.urandom(4).hex()}")
        ended = fork_ranks(tmp_path / "ends", 2, train_on(folder)) + fork_ranks(
            tmp_path / "ends", 2, train_on(expected)
        )
        assert [end.error for end in ended] == [""] * 4
        assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
        assert read_ledger(folder).entries == read_ledger(expected).entries

    return compare


def kill_at(step: int, rank: int, place: str):
    """Make one rank kill itself in a step: while it clips; or rank 0 when noise has been added, rank 1 before the next sum."""
    plain, broadcast, update = GradientSum.sum_groups, Ranks.broadcast, Trainer.update
    sums, calls = [], []

    def clip(self, *arguments):
        sums.append(0)
        if self.ranks.rank == rank and len(sums) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *arguments)

    def noisy(self, gradients):
        calls.append(0)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, gradients)

    def next_sum(self, value=None):
        if self.rank == rank and len(sums) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return broadcast(self, value)

    def counted(self, *arguments):
        sums.append(0)
        return plain(self, *arguments)

    if place == "clipping":
        return [(GradientSum, "sum_groups", clip)]
    if rank == 0:
        return [(Trainer, "update", noisy)]
    return [(GradientSum, "sum_groups", counted), (Ranks, "broadcast", next_sum)]


@pytest.mark.parametrize(("rank", "place"), [(1, "clipping"), (0, "noise"), (1, "noise")])
def test_a_rank_killed_in_a_step(rank, place, tmp_path, whole, loaded, monkeypatch, same_bits):
    folder = copied(whole, f"killed-{rank}-{place}")
    with monkeypatch.context() as patched:
        for patch in kill_at(4, rank, place):
            patched.setattr(*patch)
        ended = fork_ranks(tmp_path / "ends", 2, train_on(folder))
    assert ended[rank].code == -signal.SIGKILL
    other = ended[1 - rank]
    assert other.code == 1
    assert other.error.startswith("RankError: ")
    assert f"rank {rank}" in other.error
    assert "has ended" in other.error
    if rank == 1:
        assert f"Go on with: dpformer resume {folder}, or under torchrun with any number of processes" in other.error
    charged = read_ledger(folder).steps_charged
    assert charged == (3 if place == "clipping" else 4)
    # Rank 0 makes the step of a sum that is complete, whatever becomes of the others.
    assert charged >= steps_seen(folder) == (4 if (rank, place) == (1, "noise") else 3)
    # The checkpoint is older than the ledger: what was charged is made again, by one process or by two.
    alone = copied(folder, f"alone-{rank}-{place}")
    assert resume(alone).train()
    assert read_ledger(alone).entries[: charged + 1] == read_ledger(folder).entries
    same_bits(folder)


def test_another_sum_is_refused(tmp_path, whole, loaded, monkeypatch):
    """Processes that round otherwise (another machine): the ledger compares the sum itself before any noise."""
    folder = copied(whole, "rounded")
    with monkeypatch.context() as patched:
        for patch in kill_at(2, 1, "noise"):
            patched.setattr(*patch)
        fork_ranks(tmp_path / "ends", 2, train_on(folder))
    assert read_ledger(folder).steps_charged == 2
    plain = Ranks.sum_to_first_

    def rounded(self, tensors):
        plain(self, tensors)
        if self.first:
            tensors[0].view(-1)[3] += 1  # a step of the grid

    monkeypatch.setattr(Ranks, "sum_to_first_", rounded)
    ended = fork_ranks(tmp_path / "ends", 2, train_on(folder))
    assert "PrivacyError: answer 1 (gradients) was charged for another sum than the one made now" in ended[0].error
    assert read_ledger(folder).steps_charged == 2


def test_a_hung_rank_ends_the_run_by_the_timeout(tmp_path, whole, loaded, monkeypatch):
    folder = copied(whole, "hung")
    plain, sums = GradientSum.sum_groups, []

    def hang(self, *arguments):
        sums.append(0)
        if self.ranks.rank == 1 and len(sums) == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return plain(self, *arguments)

    monkeypatch.setattr(GradientSum, "sum_groups", hang)

    def kill_the_stopped(children: list[int]) -> None:
        began = time.monotonic()
        os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOWAIT)
        assert time.monotonic() - began < 60  # the limit is 2; on a busy machine all takes longer
        os.kill(children[1], signal.SIGKILL)

    ended = fork_ranks(tmp_path / "ends", 3, train_on(folder), 2.0, kill_the_stopped)
    assert "rank 0 waited for rank 1 of 3, which has not answered in time (--timeout 2 s)" in ended[0].error
    assert ended[2].code == 1
    assert "rank 0" in ended[2].error  # it says who ended; rank 0 says why
    assert read_ledger(folder).steps_charged == 2 == steps_seen(folder)


def test_weights_come_from_rank_0_for_each_sum(tmp_path, whole, loaded):
    """A process whose weights change between two sums, for whatever reason, changes nothing."""
    folder = copied(whole, "weights")

    def work(ranks: Ranks) -> bool:
        if ranks.first:
            return resume(folder, ranks=ranks).train()
        follower = follow(ranks)

        def disturb() -> bool:
            with torch.no_grad():
                follower.query.model.embedding.weight[2, 1] += 1.0
            return False

        return follower.train(disturb)

    ended = fork_ranks(tmp_path / "ends", 2, work)
    assert [(end.value, end.error) for end in ended] == [(True, "")] * 2
    expected = copied(whole, "weights-expected")
    assert [end.error for end in fork_ranks(tmp_path / "ends", 2, train_on(expected))] == ["", ""]
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_other_data_is_detected_before_the_start(tmp_path, whole, loaded, monkeypatch):
    folder = copied(whole, "data")
    sound = lead_and_follow.load(loaded)

    def work(ranks: Ranks) -> None:
        if ranks.first:
            train_on(folder)(ranks)
            return
        items = sound.sequences.items.copy()
        items[5] = items[5] % 20 + 1
        changed = type(sound.sequences)(sound.sequences.users, items, sound.sequences.offsets)
        lead_and_follow.load = lambda folder: type(sound)(**{**vars(sound), "sequences": changed})
        follow(ranks)

    ended = fork_ranks(tmp_path / "ends", 2, work)
    assert "DPFormerError: rank 1:" in ended[0].error
    assert "is not the data that rank 0 has" in ended[0].error
    assert ended[1].error.startswith("LeaderError")  # which the command line keeps to itself

    def other_version(ranks: Ranks) -> None:
        if not ranks.first:
            lead_and_follow.__version__ = "0.0.0"
        train_on(folder)(ranks)

    def missing(ranks: Ranks) -> None:
        if ranks.first:
            train_on(folder)(ranks)
            return

        def load(folder):
            raise DPFormerError("no such folder")

        lead_and_follow.load = load
        follow(ranks)

    ended = fork_ranks(tmp_path / "ends", 2, other_version)
    assert re.search(
        r"rank 1 has dpformer 0.0.0, torch .*, and rank 0 has dpformer .*; install the same", ended[0].error
    )
    ended = fork_ranks(tmp_path / "ends", 2, missing)
    assert "rank 1: no such folder; every machine needs the data" in ended[0].error
    assert read_ledger(folder).steps_charged == 0


def test_nobody_but_rank_0_has_keys(loaded, whole, tmp_path):
    """What rank 1 has in the end: a network and people's data, and neither Curator nor keys; no file was written by it."""
    folder = copied(whole, "keys")

    def work(ranks: Ranks) -> list[str]:
        if ranks.first:
            run = resume(folder, ranks=ranks)
            run.trainer.make_step(run.curator)
            ranks.broadcast({"released": False})
            run.close()
            return []
        follower = follow(ranks)
        assert not follower.train()
        seen, left, found = set(), [follower], []
        while left:
            one = left.pop()
            if id(one) in seen or not hasattr(one, "__dict__"):
                continue
            seen.add(id(one))
            found.append(type(one).__name__)
            left += list(vars(one).values())
        return found

    first, second = fork_ranks(tmp_path / "ends", 2, work)
    assert (first.error, second.error) == ("", "")
    assert {"Sequences", "Worker"} <= set(second.value)  # so the search looks there
    assert not {"Curator", "Keys", "Ledger"} & set(second.value)


def test_what_processes_say_to_one_another(tmp_path):
    def work(ranks: Ranks) -> list[object]:
        values = [torch.full((2, 3), float(ranks.rank)), torch.full((1,), 10.0 * ranks.rank)]
        ranks.sum_to_first_(values)
        ranks.share_(values)
        total = [value.sum().item() for value in values]
        own = ranks.deal([np.arange(k) for k in range(4)] if ranks.first else ()).tolist()
        broadcast = ranks.broadcast({"a": None} if ranks.first else 3)
        return [total, own, ranks.gather(ranks.rank), broadcast, ranks.broadcast_bytes(b"")]

    def jsonable(ranks: Ranks) -> list[object]:
        return [value.decode() if isinstance(value, bytes) else value for value in work(ranks)]

    ended = fork_ranks(tmp_path, 4, jsonable)
    for rank, end in enumerate(ended):
        heard = [0, 1, 2, 3] if rank == 0 else []
        assert end.value == [[36.0, 60.0], list(range(rank)), heard, {"a": None}, ""], end.error
