"""Which device a single process uses. There is no GPU here: what moves to it is shown with torch's device without memory."""

import pytest
import torch

from dpformer.errors import DPFormerError
from dpformer.fit.run import start
from dpformer.training.ranks import Ranks, choose_device, join
from tests.recipes import small_recipe


def test_the_device_is_chosen_by_name_and_by_what_there_is():
    assert choose_device("auto", cuda=False).type == "cpu"
    assert choose_device("auto", cuda=True).type == "cuda"
    assert choose_device("cpu", cuda=True).type == "cpu"
    assert choose_device("cuda:1", cuda=True) == torch.device("cuda", 1)
    for name, said in (("cuda", "no GPU"), ("mps", "float64"), ("gpu", "no such device"), ("meta", "no such device")):
        with pytest.raises(DPFormerError, match=said):
            choose_device(name, cuda=False)


def test_a_process_that_is_alone_has_it():
    with join(environment={}, device="cpu") as ranks:
        assert (ranks.size, ranks.device.type) == (1, "cpu")
    with pytest.raises(DPFormerError, match="no such device"), join(environment={}, device="toaster"):
        pass


def test_the_network_of_the_steps_is_moved_there(tmp_path, data):
    run = start(tmp_path / "run", data, small_recipe(), Ranks(device=torch.device("meta")))
    assert {p.device.type for p in run.begin_steps().model.parameters()} == {"meta"}
    run.close()


def test_the_command_takes_it(tmp_path, data, dpformer):
    done = dpformer("fit", data, "--run", tmp_path / "run", "--preset", "pure", "--device", "mps")
    assert done.code == 2
    assert "--device cpu" in done.err
    assert not (tmp_path / "run").exists()
