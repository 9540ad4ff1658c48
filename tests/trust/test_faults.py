"""`scripts/faults.py` finds nothing in the package, and finds each defect that is put into it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, signals and mounts as on Linux")

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Each defect is seen by the forked children, and taken out again.
PROGRAM = """
import contextlib, json, random, sys, tempfile
from pathlib import Path
from unittest import mock
import faults
import dpformer.artifact
from faulty import Stage
from dpformer.privacy import chain
from dpformer.artifact import read as released
from dpformer.fit import run
from dpformer.training import folder as folder_module

def forgetful(self, fields):
    self.position = chain.Position(self.position.entries + 1, chain._line(fields)[1])

@contextlib.contextmanager
def no_hashes():
    some = mock.patch.object(faults, "RELEASED", ("privacy.json", "model.safetensors"))
    with some, mock.patch.object(released, "check_files"), mock.patch.object(dpformer.artifact, "check_files"):
        yield

@contextlib.contextmanager
def no_sums():
    only = mock.patch.object(faults, "UNFINISHED", ("state.safetensors",))
    with only, mock.patch.object(folder_module, "sha256", lambda f: ""):
        yield

DEFECTS = {
    "charges stay in memory": ("memory", 2, mock.patch.object(chain.Chain, "append", forgetful)),
    "no hash of a checkpoint": ("damaged state", 8, no_sums()),
    "no hash of a release": ("damaged release", 10, no_hashes()),
    "memory unexplained": ("memory", 2, mock.patch.object(run, "enough_memory", lambda f: contextlib.nullcontext())),
}
with tempfile.TemporaryDirectory() as work:
    stage, found = Stage(Path(work)), {}
    sound = {kind: faults.try_kind(stage, kind, 3, 0) for kind in faults.KINDS}
    for name, (kind, tries, defect) in DEFECTS.items():
        with defect:
            results = faults.KINDS[kind](stage, random.Random(1), tries)
            found[name] = [problem for result in results for problem in result]
    json.dump({"sound": sound, "planted": found}, sys.stdout)
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=SCRIPTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_faults_are_survived(report):
    assert len(report["sound"]) == 15
    for kind, part in report["sound"].items():
        assert part["tried"] == part["survived"], (kind, part)
        assert part["tried"] >= 2 or "skipped" in part


def test_planted_defects_are_found(report):
    assert len(report["planted"]) == 4
    for name, problems in report["planted"].items():
        assert problems, f"{name}: not found"
