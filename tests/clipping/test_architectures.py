"""The architectures of docs/clipping.md: exact in float32. All of them in the nightly tier."""

import pytest
import torch

from tests.clipping.architectures import ALL, Architecture, error_of

FAST = ("GPT-2", "Gemma", "Mamba", "T5", "ViT", "Swin", "Wav2Vec 2", "PatchTST", "GRU, tied", "U-Net (group norm)",
        "Mixtral (experts)", "Switch (experts)", "BEiT")  # fmt: skip


def test_the_list_has_sixty():
    assert len({one.name for one in ALL}) == len(ALL) == 60


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
    check(one)
