import pytest
import torch
from torch import nn

from dpformer.models.recurrent import GRULayer, LSTMLayer
from tests.clipping.oracle import assert_exact

pytestmark = pytest.mark.usefixtures("float64")


PAIRS = [(GRULayer, nn.GRU), (LSTMLayer, nn.LSTM)]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_same_results_as_torch(ours, torchs):
    a, b = ours(3, 5), torchs(3, 5, batch_first=True)
    b.load_state_dict({f"{name}_l0": value for name, value in a.state_dict().items()})
    x = torch.randn(4, 7, 3)
    torch.testing.assert_close(a(x), b(x)[0])
    assert a(x[:, :0]).shape == (4, 0, 5)
    assert a(x[:0]).shape == (0, 7, 5)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("ours", [GRULayer, LSTMLayer])
def test_exact_under_clipping(ours, length):
    assert_exact(ours(3, 4), lambda m, batch: m(*batch).square().sum((1, 2)), torch.randn(5, length, 3))
