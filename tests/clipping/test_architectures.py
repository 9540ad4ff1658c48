"""The architectures of docs/clipping.md: exact in float32, or refused; never wrong. All of them in the nightly tier."""

import pytest
import torch

from dpformer.errors import ClippingError
from tests.clipping.architectures import ALL, Architecture, error_of

FAST = ("GPT-2", "Gemma", "Mamba", "T5", "ViT", "Swin", "Wav2Vec 2", "PatchTST", "GRU, tied", "U-Net (group norm)")
REFUSED = {
    "BEiT": "relative_position_bias_table",
    "Mixtral (experts)": "grouped_mm",
    "Switch (experts)": "does not hold the 3 samples",
}


def test_the_list_has_sixty():
    assert len({one.name for one in ALL}) == len(ALL) == 60
    assert len(ALL) - len(REFUSED) >= 55


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAST)
def test_exact(name):
    check(next(one for one in ALL if one.name == name))


def check(one: Architecture) -> None:
    for attention in one.attentions:
        for padded in one.paddings:
            torch.manual_seed(0)
            assert error_of(one, attention, padded) < 1e-6, (attention, padded)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", [one for one in ALL if one.name not in FAST], ids=lambda one: one.name)
def test_all(one):
    if one.name in REFUSED:
        with pytest.raises(ClippingError, match=REFUSED[one.name]):
            check(one)
    else:
        check(one)
