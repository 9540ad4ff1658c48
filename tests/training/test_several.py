"""Several real processes train a model of the caller's: to the weights of one process, charged once, ended by any that fails."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpformer.privacy import read_ledger
from dpformer.training.clipped_sum import ClippedSum
from tests.distributed.processes import together
from tests.training.support import PEOPLE, begin, losses, small_model, train, weights

STEPS, BATCH = 6, 30


def open_run(folder: str, **options):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    average = torch.optim.swa_utils.AveragedModel(model)
    chosen = {"steps": STEPS, "batch_size": BATCH, "micro_batch": 4, "checkpoint_seconds": -1.0, **options}
    return begin(Path(folder), model, optimizer=optimizer, scheduler=scheduler, average=average, **chosen)


def work(rank: int, size: int, folder: str, most: int | None = None, sizes: tuple[int, ...] = ()):
    """A run, or `most` steps of it; returns what this process ends with. sizes: of batches, by rank."""
    private = open_run(folder, **({"batch_size": sizes[rank]} if sizes else {}))
    drawn = train(private, most)
    ended = {"weights": weights(private.model), "average": weights(private.average), "drawn": drawn}
    if most is None:
        ended |= {"charged": private.statement.steps.charged, "moved": private.movement and private.movement.distance}
        ended["rate"] = private.optimizer.param_groups[0]["lr"]
    private.close()
    return ended


def lost(rank: int, size: int, folder: str):
    """A planted defect: what rank 1 sends is nothing."""
    collect = ClippedSum.collect
    if rank:
        ClippedSum.collect = lambda self, sums, stop=False: collect(self, {k: v * 0 for k, v in sums.items()}, stop)
    return work(rank, size, folder)


def failing(rank: int, size: int, folder: str):
    """Rank 1 fails in the third step."""
    private = open_run(folder)
    for batch in private:
        if rank == 1 and private.steps_made == 2:
            raise ValueError("this process fails")
        private.step(lambda batch=batch: losses(private.model, batch))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return together(1, work, str(tmp_path_factory.mktemp("alone") / "run"))[0]


@pytest.mark.parametrize("size", [2, 3])  # there are two groups of people: of three processes one has none of them
def test_the_weights_are_those_of_one_process(size, tmp_path, alone):
    """Each group is computed in the same micro-batches by whichever process, so its whole numbers are the same."""
    ended = together(size, work, str(tmp_path / "run"))
    for one in ended:
        for name in ("weights", "average"):
            assert torch.equal(one[name], alone[name])
        assert (one["charged"], one["moved"], one["rate"]) == (STEPS, alone["moved"], alone["rate"])
    parts = [[person for step in one["drawn"] for person in step] for one in ended]
    assert sorted(itertools.chain(*parts)) == sorted(person for step in alone["drawn"] for person in step)
    assert all(person // (PEOPLE // 2) == rank for rank in (0, 1) for person in parts[rank])
    assert all(not part for part in parts[2:])
    folder = tmp_path / "run"
    assert read_ledger(folder).steps_charged == STEPS
    assert not (folder / "private").exists()
    assert torch.equal(torch.cat([v.reshape(-1) for v in load_file(folder / "model.safetensors").values()]).sort().values,
                       alone["weights"].sort().values)  # fmt: skip


def test_a_part_that_is_lost_is_seen(tmp_path, alone):
    assert not torch.equal(together(2, lost, str(tmp_path / "run"))[0]["weights"], alone["weights"])


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, alone):
    folder = str(tmp_path / "run")
    together(2, work, folder, 2)
    together(1, work, folder, 2)
    ended = together(2, work, folder)
    assert read_ledger(tmp_path / "run").steps_charged == STEPS
    assert all(torch.equal(one["weights"], alone["weights"]) for one in ended)
    again = together(2, work, folder)  # it is finished
    assert all(torch.equal(one["weights"], alone["weights"]) and one["drawn"] == [] for one in again)


def test_a_process_that_fails_ends_all_and_nothing_is_charged_twice(tmp_path, alone):
    folder = tmp_path / "run"
    (first, said), (second, own) = together(2, failing, str(folder), failing=True)
    assert first != 0 != second
    assert "this process fails" in own
    assert "RankError" in said
    assert "Start the program again: what was charged is not charged again" in said
    assert read_ledger(folder).steps_charged == 2
    assert torch.equal(together(1, work, str(folder))[0]["weights"], alone["weights"])
    assert read_ledger(folder).steps_charged == STEPS


def test_processes_that_were_started_with_other_settings_are_refused_before_anything_is_charged(tmp_path):
    (_, said), (_, other) = together(2, work, str(tmp_path / "run"), None, (30, 20), failing=True)
    assert "rank 1 has other settings than rank 0; start the same program on all" in said
    assert "LeaderError" in other
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.lock"}


PROGRAM = """
import sys
from tests.training.test_several import work
work(0, 0, sys.argv[1])
"""


def test_under_torchrun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    place = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    place["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, how in (("one", []), ("two", torchrun)):
        command = [sys.executable, *how, str(tmp_path / "program.py"), str(tmp_path / name)]
        done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    assert read_ledger(tmp_path / "two").steps_charged == STEPS
