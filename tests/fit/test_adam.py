"""Adam against torch's class, and what it spares."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from dpformer.fit.adam import Adam


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (4,), ())]


def give(parameters: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for k, p in enumerate(parameters):
        p.grad = None if k == 1 and step < 3 else torch.randn_like(p)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(weight_decay):
    ours, theirs = parameters(), parameters()
    adam, reference = Adam(ours, weight_decay), torch.optim.Adam(theirs, weight_decay=weight_decay, fused=True)
    for step in range(6):
        give(ours, step)
        give(theirs, step)
        adam.step(rate := 0.1 / (step + 1))
        reference.param_groups[0]["lr"] = rate
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # some ulp of float32
    found = reference.state_dict()["state"]
    assert {f"{k}.{name}" for k, state in found.items() for name in state} == set(adam.state())


def test_it_goes_on_from_its_state():
    first, second = parameters(), parameters()
    adam, again = Adam(first), Adam(second)
    for step in range(6):
        if step == 3:
            for p, q in zip(first, second, strict=True):
                q.data.copy_(p.data)
            held = {name: value.clone() for name, value in adam.state().items()}
            again.restore(held)
        give(first, step)
        adam.step(0.1)
        if step >= 3:
            give(second, step)
            again.step(0.1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(held["0.exp_avg"], again.state()["0.exp_avg"])  # what was given is not written over


def test_nothing_imports_the_compiler():
    code = (
        "import sys, torch; from torch import nn; from dpformer.fit.adam import Adam; p = nn.Parameter(torch.ones(2)); "
        "p.grad = torch.ones(2); Adam([p]).step(0.1); print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
