"""The floating-point attacks on released folders, with the old noise as a control: the control breaks, the product does not.

The attacker is the one that the statement names: knows the code and everybody else's events, has the folder, and wants to
know of one person whether the events are in it. Each target is attacked for itself. With the old noise a verdict is a proof, so
not one may be wrong; of the product's folders no verdict may be more often right than the closed form of its noise says.
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dpformer.data import demo_frame, prepare, save
from dpformer.data.named import ML_1M, prepare_named
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe
from dpformer.privacy import Answer, Curator
from dpformer.privacy.query import grid_step
from dpformer.statistics.histogram import histogram_of
from dpformer.statistics.settings import TransitionSettings
from tests.attacks.folders import Game, Hearing, OldNoise, most_right, phi, release, right, wrong
from tests.attacks.support import Float32Noise, GridNoise, PriorAttack, Target, attack_scores
from tests.conftest import find_set

GRID = grid_step(1.0, 500)


@pytest.fixture(scope="module", params=["demo", pytest.param("ml-1m", marks=pytest.mark.slow)])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the embedded readers, or MovieLens-1M."""
    folder = tmp_path_factory.mktemp(request.param) / "data"
    if request.param == "demo":
        log = demo_frame()
        save(prepare(log.filter(log["user_id"] < "reader-1500")), folder)
    else:
        save(prepare_named("ml-1m", find_set(ML_1M, "DPFORMER_ML_1M")), folder)
    return folder


def popularity(epsilon: float) -> Recipe:
    return make_recipe("popularity", epsilon=epsilon)


def default(epsilon: float) -> Recipe:
    """The default preset. What the network learns of the answers is left out: it takes long and adds nothing to the folder."""
    return make_recipe("distilled", epsilon=epsilon, **{"distil.steps": 1})


def histogram_std(folder: Path) -> float:
    """The noise of the histogram, by the folder's statement."""
    releases = json.loads((folder / "privacy.json").read_text())["releases"]
    return float(next(r["noise_multiplier"] for r in releases if "histogram" in r["name"]))


def attack_on_prior(folder: Path, noise: Float32Noise | GridNoise) -> PriorAttack:
    tensors = load_file(folder / "model.safetensors")
    return PriorAttack(
        tensors["transitions.head"],
        tensors["transitions.prior"],
        TransitionSettings().popularity,
        histogram_std(folder),
        noise,
    )


def attack_on_scores(folder: Path, noise: Float32Noise | GridNoise, target: Target) -> str:
    return attack_scores(load_file(folder / "model.safetensors")["counts"], noise, target)


def check_broken(table: Counter[tuple[str, str]], share: float) -> None:
    assert wrong(table) == 0, f"a proof of the wrong thing: {dict(table)}"
    assert right(table) >= share * table.total(), f"the control must break, or the attack is none: {dict(table)}"


def check_nothing_is_told(table: Counter[tuple[str, str]]) -> None:
    """Steps of one grid: both hypotheses are possible, for everybody. That needs no tolerance."""
    assert table.keys() <= {("in", "?"), ("out", "?")}, dict(table)


def check_holds(table: Counter[tuple[str, str]], std: float) -> None:
    """Of v verdicts as many are right as v coins of probability Phi(1 / (2 std)) show heads, but for one run in a million."""
    verdicts = right(table) + wrong(table)
    most = most_right(verdicts, phi(0.5 / std))
    assert right(table) <= most, (
        f"{right(table)} of {verdicts} verdicts are right, and {most} are allowed: {dict(table)}"
    )


def test_popularity_with_the_old_noise_is_broken(data: Path, tmp_path: Path) -> None:
    game = Game.of(data, targets=120, least=20, seed=1)
    folder = release(tmp_path / "run", data, popularity(0.25), game.curator(partial(OldNoise, seed=1)))
    table = game.play(None, partial(attack_on_scores, folder, Float32Noise(histogram_std(folder))))
    check_broken(table, 0.75)


def test_popularity_is_not(data: Path, tmp_path: Path) -> None:
    game = Game.of(data, targets=400, least=1, seed=1)
    folder = release(tmp_path / "run", data, popularity(0.25), game.curator(Curator))
    std = histogram_std(folder)
    check_nothing_is_told(game.play(GRID, partial(attack_on_scores, folder, GridNoise(GRID))))
    # The attack that breaks the control. On noise of another kind it mostly finds neither of the two possible.
    check_holds(game.play(GRID, partial(attack_on_scores, folder, Float32Noise(std))), std)
    check_holds(game.play(None, partial(attack_on_scores, folder, Float32Noise(std))), std)


def test_the_default_preset_with_the_old_noise_is_broken(data: Path, tmp_path: Path) -> None:
    game = Game.of(data, targets=24, least=20, seed=2)
    folder = release(tmp_path / "run", data, default(4.0), game.curator(partial(OldNoise, seed=2)))
    table = game.play(None, attack_on_prior(folder, Float32Noise(histogram_std(folder))).verdict)
    check_broken(table, 0.75)


def test_the_default_preset_is_not(data: Path, tmp_path: Path) -> None:
    game = Game.of(data, targets=24, least=1, seed=2)
    answers: list[Answer] = []
    folder = release(tmp_path / "run", data, default(4.0), game.curator(partial(Hearing, answers)))
    std = histogram_std(folder)
    check_holds(game.play(GRID, attack_on_prior(folder, Float32Noise(std)).verdict), std)
    # Now with the mean of the noisy counts, which the folder does not tell.
    head = load_file(folder / "model.safetensors")["transitions.head"]
    mean = float(np.maximum(histogram_of(answers[0])[head], 0.3 * std + 0.5).mean())
    check_nothing_is_told(game.play(GRID, partial(attack_on_prior(folder, GridNoise(GRID)).verdict, mean=mean)))
    check_holds(game.play(GRID, partial(attack_on_prior(folder, Float32Noise(std)).verdict, mean=mean)), std)
