"""Nothing leaves but answers: with the same answers, folders made from different people are the same, byte for byte.

A run is made and its answers are kept. Then a run is made on other people, as many, with other histories of other lengths; its
queries are summed over them as ever, and the kept answers are handed out. Whatever differs in the folders came past the Curator.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.data import Dataset, Sequences, demo_frame, prepare, save
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe
from dpformer.privacy import Answer, Curator
from tests.attacks.folders import Hearing, release
from tests.recipes import plain_recipe

USERS = 200
# What is not compared: files for the owner alone, the run's random name and the hashes that contain it, and the answers that
# the second Curator gave: they were not handed out.
OWN = {"answers", "events.jsonl", "local.json", "run.lock", "ledger.lock", "ledger.jsonl", "ledger.head"}


class Repeating(Curator[Sequences]):
    """Sums over people as the product does, and answers what another run has heard."""

    def __init__(self, answers: list[Answer], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers = iter(answers)

    def ask(self, query: Any) -> Answer:
        super().ask(query)
        return next(self._answers)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two data sets with the same users and the same catalogue, and nothing else in common."""
    folder = tmp_path_factory.mktemp("readers")
    log = demo_frame()
    first = prepare(log.filter(log["user_id"] < f"reader-{USERS:04d}"))
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 60, USERS)
    items = rng.integers(1, len(first.catalogue) + 1, lengths.sum()).astype(np.int32)
    other = Sequences(first.sequences.users, items, np.concatenate([[0], np.cumsum(lengths)]))
    save(first, folder / "first")
    save(Dataset(other, first.catalogue, first.manifest), folder / "second")
    return folder / "first", folder / "second"


def recipes() -> list[Any]:
    steps = {"batch_size": 60, "epochs": 0.6, "d": 8, "max_length": 10}
    return [
        pytest.param(make_recipe("distilled", seed=1, **{"distil.steps": 2}), id="distilled"),
        pytest.param(make_recipe("popularity", seed=1), id="popularity"),
        pytest.param(make_recipe("pure", seed=1, vocabulary=50, **steps), id="pure"),
        pytest.param(make_recipe("whole", seed=1, vocabulary=50, **steps), id="whole"),
        pytest.param(make_recipe("paper", seed=1, **steps), id="paper"),
        pytest.param(plain_recipe(model="gru", dropout=0.1, seed=1, **steps), id="gru"),
    ]


def compared(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for the run's name."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in OWN}
    statement = json.loads(files.pop("privacy.json"))
    ledger = statement.pop("ledger")
    hashes = json.loads(files.pop("files.json"))
    del hashes["privacy.json"]
    card = files.pop("README.md").decode()
    for text in (ledger["run_id"], ledger["hash"]):
        card = card.replace(text, "")
    files |= {"privacy": json.dumps(statement).encode(), "hashes": json.dumps(hashes).encode(), "card": card.encode()}
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    entries[0].pop("run_id")
    names = [{key: value for key, value in e.items() if key not in ("hash", "previous", "tag")} for e in entries]
    return files | {"ledger": json.dumps(names).encode()}


@pytest.mark.parametrize("recipe", recipes())
def test_the_same_answers_make_the_same_folder(recipe: Recipe, data: tuple[Path, Path], tmp_path: Path) -> None:
    answers: list[Answer] = []
    first = compared(release(tmp_path / "first", data[0], recipe, partial(Hearing, answers)))
    second = compared(release(tmp_path / "second", data[1], recipe, partial(Repeating, answers)))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_other_answers_make_another(data: tuple[Path, Path], tmp_path: Path) -> None:
    """The comparison can fail."""
    recipe = make_recipe("popularity", seed=1)
    first, second = (compared(release(tmp_path / d.name, d, recipe, Curator)) for d in data)
    assert {"model.safetensors", "hashes"} == {name for name in first if first[name] != second[name]}
