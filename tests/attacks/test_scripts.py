"""The scripts of `attacks/` print what `attacks/README.md` says. `tests/clipping/test_opacus.py` runs the one about peers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.trust.verify.run import embedded

ATTACKS = Path(__file__).parents[2] / "attacks"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scripts")
    embedded(place / "data")
    for name, seed in (("a", None), ("seeded", 7)):
        start(place / name, place / "data", make_recipe("popularity", seed=seed)).train()
    return place


def printed(place: Path, script: str, run: str) -> list[str]:
    command = [sys.executable, ATTACKS / script, place / run, place / "data"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("script", "run"), [("floating_point.py", "a"), ("subtract_noise.py", "a"), ("subtract_noise.py", "seeded")]
)
def test_a_script_prints_what_its_page_says(script: str, run: str, place: Path) -> None:
    lines = printed(place, script, run)
    row = next(row for row in (ATTACKS / "README.md").read_text().splitlines() if f"{script} runs/{run} data`" in row)
    assert lines
    assert all(f"`{line}`" in row for line in lines)
