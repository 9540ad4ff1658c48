"""Each planted defect is caught: in a folder that was made with it, and in the small runs of `verify`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.artifact import load
from dpformer.files import sha256
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import start
from dpformer.privacy import Curator
from dpformer.privacy.query import Statistic
from dpformer.trust.verify.answers import check_answers
from dpformer.trust.verify.checks import Verification
from dpformer.trust.verify.own import check_own
from dpformer.trust.verify.run import check_files, embedded
from tests.recipes import plain_recipe
from tests.trust import planted
from tests.trust.planted import Asking, OnlyAnswer, Scaled, noise

STATISTICS, STEPS, MODEL = "this run: statistics", "this run: steps", "this run: model from answers"
CHARGES = "this run: charges"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded(tmp_path_factory.mktemp("planted") / "data")


def transitions() -> Recipe:
    return make_recipe("transitions")


def gru() -> Recipe:
    return plain_recipe(model="gru", d=16, max_length=12, epochs=3.0)


def default() -> Recipe:
    return make_recipe(d=8, max_length=10, vocabulary=40, epochs=2.0)


def distilled() -> Recipe:
    return make_recipe("distilled", d=8, max_length=10, **{"distil.steps": 2})


def own(folder: Path, data: Path, recipe: Recipe, curator: Any) -> list[str]:
    """What fails of a folder that was made with this Curator, by the sound `verify`."""
    from dpformer.data import load as load_data

    start(folder, data, recipe, make_curator=curator).train()
    verification = Verification("planted")
    check_own(verification, folder, load_data(data).train(recipe.hold_out), "")
    skipped = [check.name for check in verification.checks if check.status == "not checked"]
    assert not skipped or recipe.epsilon > 50, "with little noise the sums of steps hide it, and the check says so"
    return verification.failed


@pytest.mark.parametrize("recipe", [transitions, gru, default, distilled], ids=lambda f: f.__name__)
def test_a_sound_folder_passes(recipe: Any, data: Path, tmp_path: Path) -> None:
    assert own(tmp_path / "run", data, recipe(), Curator) == []


@pytest.mark.parametrize("number", range(4))
def test_seven_tenths_of_the_noise_in_any_answer(number: int, data: Path, tmp_path: Path) -> None:
    defect = noise(OnlyAnswer(number, Scaled(0.7)))
    assert own(tmp_path / "run", data, distilled(), defect) == [STATISTICS]


def test_seven_tenths_of_the_noise_in_steps(data: Path, tmp_path: Path) -> None:
    assert own(tmp_path / "run", data, gru(), noise(Scaled(0.7))) == [STATISTICS, STEPS]


def test_one_answer_that_is_not_noised(data: Path, tmp_path: Path) -> None:
    defect = noise(OnlyAnswer(2, planted.no_noise))
    assert own(tmp_path / "run", data, transitions(), defect) == [STATISTICS]


def test_exact_counts_in_the_released_model(data: Path, tmp_path: Path) -> None:
    """The Curator charges and keeps what it should; the model is made of something else."""
    assert MODEL in own(tmp_path / "a", data, distilled(), planted.Exact)
    assert own(tmp_path / "b", data, transitions(), planted.ExactAndKept) == [STATISTICS]


def test_vectors_of_norm_1_3(data: Path, tmp_path: Path) -> None:
    """On sixty people the noise must be small for 0.3 of a sum to show; the small runs below measure it without noise."""
    recipe = default().changed({"epsilon": 100.0})
    assert STATISTICS in own(tmp_path / "run", data, recipe, partial(Asking, planted.Longer))


def test_another_grid_than_the_public_one(data: Path, tmp_path: Path) -> None:
    assert "this run: grid" in own(tmp_path / "run", data, transitions(), planted.Finer)


def test_one_released_twice_and_charged_once(data: Path, tmp_path: Path) -> None:
    assert own(tmp_path / "run", data, transitions(), planted.Twice) == [STATISTICS]


def test_the_same_noise_in_all_answers(data: Path, tmp_path: Path) -> None:
    assert own(tmp_path / "run", data, transitions(), noise(planted.the_same_noise)) == [STATISTICS]


def test_an_answer_that_is_not_charged_stops_the_run(data: Path, tmp_path: Path) -> None:
    """The next answer is asked before its place in the ledger; nothing is published."""
    with pytest.raises(Exception, match="asked before"):
        own(tmp_path / "run", data, transitions(), planted.Uncharged)


# --- the small runs of verify -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def few(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dpformer.data import load as load_data
    from dpformer.trust.verify.people import a_few, write_data

    dataset = load_data(data)
    return write_data(tmp_path_factory.mktemp("few") / "data", a_few(dataset, 13), dataset.catalogue)


def small_runs(few: Path, place: Path, recipe: Recipe, curator: Any) -> list[str]:
    verification = Verification("planted")
    small = recipe.changed({"seed": 5, "delta": 1e-3, "dpsgd.batch_size": 10, "dpsgd.epochs": 2.0})
    check_answers(verification, curator, small, few, place)
    return verification.failed


DEFECTS: dict[str, tuple[Any, Any, set[str]]] = {
    "sound": (gru, Curator, set()),
    "seven tenths of the noise": (gru, noise(Scaled(0.7)), {"noise"}),
    "no noise": (gru, noise(planted.no_noise), {"noise"}),
    "the same noise": (gru, noise(planted.the_same_noise), {"noise"}),
    "shifted noise": (transitions, noise(planted.shifted_noise), {"noise"}),
    "between the steps": (transitions, noise(planted.noise_between_the_steps), {"noise", "model from answers"}),
    "another sampler": (gru, partial(Curator, draw=planted.FixedSize()), {"sampler"}),
    "norm 1.3": (default, partial(Asking, planted.Longer), {"sensitivity"}),
    "coupled": (transitions, partial(Asking, planted.Coupled), {"sensitivity"}),
    "understated": (transitions, partial(Asking, planted.Understated), {"queries planned", "noise"}),
    "twice": (transitions, planted.Twice, {"noise", "sensitivity"}),
    "exact": (transitions, planted.Exact, {"noise", "model from answers"}),
    "peeking": (transitions, planted.Peeking, {"sensitivity", "same queries for neighbours"}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_turns_its_check_red(name: str, few: Path, tmp_path: Path) -> None:
    recipe, curator, expected = DEFECTS[name]
    assert set(small_runs(few, tmp_path, recipe(), curator)) == expected


# --- fields of the folder ---------------------------------------------------------------------------------------------


def changed_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def extra_field_in_config(run: Path) -> None:
    changed_json(run / "config.json", users_seen=6040)


def extra_field_in_the_ledger(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"norm": 3.7})
    (run / "ledger.jsonl").write_text("\n".join(lines) + "\n")


def extra_field_in_the_catalogue(run: Path) -> None:
    lines = [json.loads(line) | {"count": k} for k, line in enumerate((run / "items.jsonl").read_text().splitlines())]
    (run / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def extra_file(run: Path) -> None:
    np.save(run / "sums.npy", np.arange(3))


def a_sentence_in_the_card(run: Path) -> None:
    (run / "README.md").write_text((run / "README.md").read_text() + "\nAlice was in the data.\n")


def losses_for_all_to_read(run: Path) -> None:
    (run / "local.json").chmod(0o644)


FIELDS = {
    extra_field_in_config: "'users_seen' is not on the list",
    extra_field_in_the_ledger: "'norm' is not on the list",
    extra_field_in_the_catalogue: "'count' is not on the list",
    extra_file: "sums.npy is not on the list",
    a_sentence_in_the_card: "README.md has something",
    losses_for_all_to_read: "others may read it",
}


@pytest.mark.parametrize("tamper", FIELDS, ids=lambda f: f.__name__)
def test_a_field_outside_of_the_list_fails(tamper: Any, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, data, make_recipe("popularity")).train()
    tamper(run)
    # Hashes detect damage; who adds a field makes them fit.
    changed_json(run / "files.json", **{"config.json": sha256(run / "config.json")})
    verification = Verification("planted")
    check_files(verification, run, load(run), read_recipe(run))
    assert "fields" in verification.failed
    assert FIELDS[tamper] in next(check.detail for check in verification.checks if check.name == "fields")


def test_statistics_are_statistics() -> None:
    """Own answers are compared for every query that is a `Statistic`; another kind must be added there."""
    from dpformer.statistics.histogram import Histogram
    from dpformer.statistics.transitions import Transitions

    assert issubclass(Histogram, Statistic)
    assert issubclass(Transitions, Statistic)
