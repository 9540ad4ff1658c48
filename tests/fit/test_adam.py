"""Adam against torch's class, its floor against a closed form, and the noise that it tracks against sampling."""

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


@pytest.mark.parametrize(("weight_decay", "beta1"), [(0.0, 0.9), (0.1, 0.5)])
def test_without_noise_steps_are_those_of_torch(weight_decay, beta1):
    ours, theirs = parameters(), parameters()
    reference = torch.optim.Adam(theirs, betas=(beta1, 0.999), weight_decay=weight_decay, fused=True)
    adam = Adam(ours, weight_decay, beta1)
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


@pytest.mark.parametrize("noise_std", [0.0, 0.1])
def test_it_goes_on_from_its_state(noise_std):
    first, second = parameters(), parameters()
    adam, again = (Adam(each, noise_std=noise_std, track=noise_std > 0) for each in (first, second))
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


def test_no_row_is_divided_by_less_than_the_noise():
    """By the closed form of the first step: m = (1 - b) g, so p = -rate g / max(root mean square of the row, s)."""
    g = torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64)
    p, vector = nn.Parameter(torch.zeros_like(g)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad, vector.grad = g.clone(), torch.tensor([4.0, 0.1], dtype=torch.float64)
    Adam([p, vector], beta1=0.3, noise_std=2.0).step(0.7)
    root = torch.tensor([[(25 / 3) ** 0.5], [2.0]], dtype=torch.float64)
    torch.testing.assert_close(p.detach(), -0.7 * g / root, rtol=1e-7, atol=0)  # the 1e-8 beside the root
    # A vector has no rows: each coordinate has a mean square of its own.
    torch.testing.assert_close(
        vector.detach(), torch.tensor([-0.7, -0.7 * 0.05], dtype=torch.float64), rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_the_tracked_variance_is_that_of_the_noise(beta1):
    """Noise alone, so that a parameter is its accumulated noise. 200 x 400 samples of a variance that differs by less than 5 %
    between rows: its mean has a standard error of 0.5 %, and the divisor depends on the noise by less than 3 %.
    """
    torch.manual_seed(0)
    s, p = 0.3, nn.Parameter(torch.zeros(200, 400, dtype=torch.float64))
    adam = Adam([p], beta1=beta1, noise_std=s, track=True)
    for step in range(1, 31):
        p.grad = s * torch.randn_like(p)
        adam.step(0.1 * (31 - step) / 30)
    variance = adam.noise_variances()[0]
    assert variance.shape == (200, 1)
    assert float(p.detach().square().mean() / variance.mean()) == pytest.approx(1, abs=0.04)
    if beta1:  # what it would be if steps were independent: the noise of a step comes back by momentum
        independent = sum((0.1 * (31 - step) / 30) ** 2 for step in range(1, 31)) * (1 - beta1) / (1 + beta1)
        assert abs(float(p.detach().square().mean()) / independent - 1) > 0.3


def test_the_tracked_variance_by_hand():
    """Two steps without a floor in the way: p2 = -a1 m1 - a2 m2 with m1 = (1-b) z1 and m2 = b (1-b) z1 + (1-b) z2."""
    b, s, p = 0.6, 0.5, nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
    adam, divisors = Adam([p], beta1=b, noise_std=s, track=True), []
    squares = []
    for step, g in enumerate((torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])), 1):
        p.grad = g.double()
        adam.step(0.1)
        squares.append(float(g.square().mean()))
        v = sum(0.001 * 0.999 ** (step - 1 - k) * square for k, square in enumerate(squares))
        divisors.append(0.1 / (1 - b**step) / ((v / (1 - 0.999**step)) ** 0.5 + 1e-8))
    a1, a2 = divisors
    by_hand = s**2 * (1 - b) ** 2 * ((a1 + a2 * b) ** 2 + a2**2)
    assert float(adam.noise_variances()[0]) == pytest.approx(by_hand, rel=1e-9)


def test_nothing_imports_the_compiler():
    code = (
        "import sys, torch; from torch import nn; from dpformer.fit.adam import Adam; p = nn.Parameter(torch.ones(2)); "
        "p.grad = torch.ones(2); Adam([p]).step(0.1); print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
