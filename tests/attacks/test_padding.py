"""One long person among people who are alike: `attacks/padding.py` with the collate functions that the loop takes and refuses."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dpformer.errors import PrivacyError
from dpformer.privacy import read_ledger
from dpformer.training.groups import CLIP_SLACK, FLOAT32_SLACK
from dpformer.training.people import Loader, group_people
from tests.training.support import begin

ATTACK = runpy.run_path(str(Path(__file__).parents[2] / "attacks" / "padding.py"))
MODELS = ATTACK["MODELS"]
SLACK = CLIP_SLACK + ATTACK["PEOPLE"] * FLOAT32_SLACK
SHORT, LONG = torch.arange(1, 6), torch.arange(1, 12)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_people_of_one_length_stay_within_a_quarter_of_the_slack(kind: Any) -> None:
    assert ATTACK["worst"](kind, ATTACK["to_one_length"]) <= SLACK / 4


def test_padding_to_the_longest_would_not() -> None:
    """The reason for the refusal: rounding beyond the slack, and a model that reads padding far beyond the clipping norm."""
    attention, _, convolution = MODELS
    assert ATTACK["worst"](attention, ATTACK["to_the_longest"]) > SLACK / 4
    assert ATTACK["worst"](convolution, ATTACK["to_the_longest"]) > 10


def batches(people: list[Any], collate: Any, parts: list[list[int]]) -> list[Any]:
    return list(Loader(group_people(people), collate, 0).batches([torch.tensor(part).numpy() for part in parts], b""))


def time_first(people: list[torch.Tensor]) -> torch.Tensor:
    return ATTACK["to_the_longest"](people).T.contiguous()


def as_mapping(people: list[torch.Tensor]) -> Any:
    return transformers.BatchEncoding({"input_ids": ATTACK["to_the_longest"](people)})


@pytest.mark.parametrize("collate", [ATTACK["to_the_longest"], time_first, as_mapping])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 3], [1, 3], [2, 3]]])
def test_a_shape_that_one_person_decides_is_refused(collate: Any, parts: list[list[int]]) -> None:
    """Also where all micro-batches at hand have the same shape: the last is in each of them."""
    with pytest.raises(PrivacyError, match="Pad everybody to one length"):
        batches([SHORT, SHORT, SHORT, LONG], collate, parts)


def test_stacked_people_of_two_lengths_are_refused() -> None:
    with pytest.raises(PrivacyError, match="Pad everybody to one length"):
        batches([SHORT, SHORT, LONG, LONG], None, [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    "collate",
    [
        ATTACK["to_one_length"],
        lambda people: ATTACK["to_one_length"](people).T,
        lambda people: {"rows": torch.cat(people)[:, None].expand(-1, 3), "counts": torch.tensor([*map(len, people)])},
        lambda people: torch.nn.utils.rnn.pack_sequence(people, enforce_sorted=False).data,
        lambda people: [str(one.tolist()) for one in people],
    ],
)
def test_shapes_that_nobody_decides_are_taken(collate: Any) -> None:
    assert len(batches([SHORT, SHORT, LONG, LONG, SHORT], collate, [[0, 2], [1, 3, 4], [2]])) == 3


def test_nothing_is_charged(tmp_path: Path) -> None:
    people = [(0, torch.randn(5 + k % 2)) for k in range(60)]
    private = begin(
        tmp_path / "run", dataset=people, collate_fn=lambda own: ATTACK["to_the_longest"]([x for _, x in own])
    )
    with pytest.raises(PrivacyError, match="Pad everybody to one length"):
        next(iter(private))
    assert read_ledger(private.run).steps_charged == 0
