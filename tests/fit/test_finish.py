"""The end of a run, crashed at each of its steps: no folder that opens has secrets, and `resume` ends it with the same model."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dpformer import DPFormer, load_model
from dpformer.artifact.read import has_checkpoint
from dpformer.artifact.write import is_written
from dpformer.errors import DPFormerError
from dpformer.fit.folder import finish_written
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import Keys, read_ledger
from tests.recipes import small_recipe

RECIPES = {"network": small_recipe(epochs=1.0), "statistics": small_recipe("popularity")}
CALLS = ("replace", "rename", "unlink", "rmdir", "fsync", "mkdir", "open")
SECRETS = 12  # answers and more of the runs here


class Killed(BaseException):
    """Nothing in the package may catch this and tidy up: it stands for a kill -9."""


def secrets(seed: int = 1) -> list[bytes]:
    """The secret of a seeded run at each place, as bytes and as text: made here from their definition."""
    secret, found = hashlib.sha256(f"seed {seed}".encode()).digest(), []
    for _ in range(SECRETS):
        found += [secret, secret.hex().encode()]
        secret = hashlib.sha256(b"next" + secret).digest()
    return found


def holds_secrets(folder: Path) -> bool:
    """Is a key of the noise anywhere below this folder, in a file that is whole or half written?"""
    content = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return any(secret in one for one in content for secret in secrets())


def openers(run: Path, dpformer: Callable) -> Iterator[str]:
    """What everything that opens a run folder says: each error in turn, and an empty text where one opened it."""
    aside = run.parent / "aside"
    for command in (
        ("show", run),
        ("show", run, "--json"),
        ("recommend", run, "--history", "i03"),
        ("evaluate", run),
        ("report", run, "-o", aside),
        ("export", run, "--torch", "-o", aside),
        ("serve", run, "--port", "0"),
        ("verify", run),
        ("audit", run),
        ("refit", run, run.parent, "--run", aside),
        ("privacy", run),
    ):
        done = dpformer(*command)
        assert done.out == "" or done.code == 0
        yield done.err if done.code == 2 else ""
    for function in (load_model, DPFormer.load):
        try:
            function(run)
        except DPFormerError as error:
            yield str(error)
        else:
            yield ""
    assert not aside.exists()


def is_open(run: Path) -> bool:
    try:
        load_model(run)
    except DPFormerError:
        return False
    return True


@pytest.fixture(scope="module", params=RECIPES)
def ready(request, tmp_path_factory, data) -> tuple[Path, Path]:
    """A run with nothing left to do but its end, and the same one ended without interruption."""
    folder = tmp_path_factory.mktemp("ready")
    return make_ready(folder, data, RECIPES[request.param])


def make_ready(folder: Path, data: Path, recipe: Recipe) -> tuple[Path, Path]:
    run = start(folder / "ready", data, recipe)
    if recipe.steps_on_data:
        assert not run.train(should_stop=lambda: run.step == run.plan.steps)
    run.close()
    whole = Path(shutil.copytree(folder / "ready", folder / "whole"))
    assert resume(whole).train()
    assert not holds_secrets(whole)
    assert holds_secrets(folder / "ready")  # so the search would find one
    return folder / "ready", whole


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[str]]:
    """Die at the `number`-th call that changes the disk; gives what was called."""
    calls: list[str] = []

    def wrap(name: str, real):
        def called(*arguments, **options):
            calls.append(name)
            if len(calls) == number:
                raise Killed
            return real(*arguments, **options)

        return called

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def assert_cured(folder: Path, whole: Path, dpformer: Callable) -> None:
    done = dpformer("resume", folder, "--quiet")
    assert done.code == 0 or "is finished" in done.err, done.err
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    for name in ("model.safetensors", "config.json", "items.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert read_ledger(folder).entries == read_ledger(whole).entries
    assert not holds_secrets(folder)
    assert is_open(folder)


def assert_safe(folder: Path, dpformer: Callable) -> bool:
    """No folder that opens has secrets; one that does not says what to do. Gives whether it opens."""
    if is_open(folder):
        assert not holds_secrets(folder)
        assert not (folder / "private").exists()
        assert dpformer("show", folder).code == 0
        return True
    for said in openers(folder, dpformer):
        assert f"dpformer resume {folder}" in said, said
    return False


def test_a_crash_at_each_call_of_the_end(ready, tmp_path, monkeypatch, dpformer):
    begun, whole = ready
    seen = {"before": 0, "release written": 0, "secrets gone": 0, "some files in place": 0, "complete": 0}
    for number in range(1, 1000):
        folder = Path(shutil.copytree(begun, tmp_path / f"run-{number}"))
        run = None
        with dying(monkeypatch, number) as calls:
            try:
                run = resume(folder)
                run.train()
            except Killed:
                pass
        if run is not None:
            run.close()
        if len(calls) < number:
            break
        opened = assert_safe(folder, dpformer)
        if opened:
            seen["complete"] += 1
        elif (folder / "files.json").exists():
            seen["some files in place"] += 1
        elif not has_checkpoint(folder):
            seen["secrets gone"] += 1
        else:
            seen["release written" if is_written(folder) else "before"] += 1
        if opened:
            assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert_cured(folder, whole, dpformer)
    else:
        pytest.fail("it never ended")
    assert min(seen.values()) > 0, seen


def test_a_crash_at_each_call_of_the_cure(ready, tmp_path, monkeypatch, dpformer):
    """The release is written, and nothing is deleted yet; then each call of `resume` dies in turn."""
    begun, whole = ready
    written = Path(shutil.copytree(begun, tmp_path / "written"))
    run = resume(written)
    with monkeypatch.context() as patched:
        patched.setattr("dpformer.artifact.write.complete", lambda folder: None)
        run.train()
    run.close()
    assert is_written(written)
    assert holds_secrets(written)
    for number in range(1, 1000):
        folder = Path(shutil.copytree(written, tmp_path / f"run-{number}"))
        with dying(monkeypatch, number) as calls, suppress(Killed):
            finish_written(folder)
        assert_safe(folder, dpformer)
        assert_cured(folder, whole, dpformer)
        if len(calls) < number:
            break
    assert number > 15
    # Died again and again, a call further each time, it ends too.
    number = 1
    while not is_open(written):
        with dying(monkeypatch, number):
            try:
                finish_written(written)
            except Killed:
                number += 1
        assert_safe(written, dpformer)
    assert_cured(written, whole, dpformer)


@pytest.mark.parametrize("call", ["replace", "unlink", "rmdir", "fsync"])
def test_a_disk_that_refuses_is_one_line_with_the_cure(call, ready, tmp_path, monkeypatch, dpformer):
    begun, whole = ready
    folder = Path(shutil.copytree(begun, tmp_path / "run"))
    run = resume(folder)

    def denied(*arguments, **options):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        plain = run.statement
        # Only the end: what comes before the release is written has tests of its own.
        patched.setattr(run, "statement", lambda: plain())
        patched.setattr("dpformer.artifact.write.write_folder", _write_then(patched, call, denied))
        with pytest.raises(DPFormerError, match=rf"Permission denied.*dpformer resume {folder}"):
            run.train()
    run.close()
    assert not assert_safe(folder, dpformer)
    assert_cured(folder, whole, dpformer)


def _write_then(patched: pytest.MonkeyPatch, call: str, denied: Callable) -> Callable:
    from dpformer.files import write_folder

    def write(*arguments, **options):
        write_folder(*arguments, **options)
        patched.setattr(os, call, denied)

    return write


# Strace: a real kill, in the kernel


TRACED = ("fsync", "rename", "unlink", "unlinkat", "rmdir")
MANY = 100
# A child for each call: strace counts for each process and kind of call. The child wastes calls until the right one is next.
SCRIPT = """
import os, shutil, sys
from contextlib import suppress
from pathlib import Path
import torch
from dpformer.artifact import write as write_module
from dpformer.fit import folder as folder_module
from dpformer.fit.run import resume
begun, place, many = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
# polars does not survive a fork.
dataset = folder_module.load(folder_module.data_of(begun))
packed, hashes = write_module.pack_catalogue(dataset.catalogue), write_module.column_hashes(dataset.catalogue)
folder_module.load = lambda folder: dataset
write_module.pack_catalogue = lambda catalogue: packed
write_module.column_hashes = lambda catalogue: hashes
torch.set_num_threads(1)
idle, none, here = os.open(place / "idle", os.O_CREAT | os.O_RDWR), place / "none", os.open(place, os.O_RDONLY)
waste = {
    "fsync": lambda: os.fsync(idle),
    "rename": lambda: os.rename(none, none),
    "unlink": lambda: os.unlink(none),
    "unlinkat": lambda: os.unlink("none", dir_fd=here),
    "rmdir": lambda: os.rmdir(none),
}
for kind, call in waste.items():
    for number in range(1, many):
        folder = shutil.copytree(begun, place / f"{kind}-{number}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(many - number):
                    with suppress(OSError):
                        call()
                resume(folder).train()
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            print(kind, number, os.WEXITSTATUS(status))
            break
"""


def strace(*arguments: object, log: Path | str = os.devnull) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("strace")
    if tool is None:
        pytest.skip("needs strace, which kills a process at a given call")
    if subprocess.run([tool, "-qq", "-o", os.devnull, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here (ptrace is not permitted)")
    command = [tool, "-f", "-qq", "-s", 4096, "-o", log, f"--trace={','.join(TRACED)}", *arguments]
    place = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, env=place, check=False)


def test_a_kill_at_each_system_call_of_the_end(ready, tmp_path, dpformer):
    begun, whole = ready
    steps = read_ledger(begun).plan.steps
    inject = f"--inject={','.join(TRACED)}:signal=SIGKILL:when={MANY}"
    done = strace(inject, sys.executable, "-c", SCRIPT, begun, tmp_path, MANY)
    assert done.returncode == 0, done.stderr
    opened, folders = 0, 0
    for line in done.stdout.splitlines():
        kind, last, code = line.split()
        assert int(code) == 0, done.stderr
        assert is_open(tmp_path / f"{kind}-{last}")  # it had no call left to be killed at
        assert int(last) > 1 or (kind, steps) == ("unlink", 0)
        for number in range(1, int(last)):
            folder, folders = tmp_path / f"{kind}-{number}", folders + 1
            opened += is_open(folder) if number % 5 else assert_safe(folder, dpformer)
            assert not (is_open(folder) and holds_secrets(folder))
            assert_cured(folder, whole, dpformer)
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(TRACED)
    assert 0 < opened < folders - 20


def test_the_command_killed_in_the_end(tmp_path, data, dpformer):
    """The whole of `dpformer fit`, in a process of its own: killed at the first file of a secret, and at the model's rename."""
    small = ["--preset", "pure", "--epsilon", "20", "--delta", "1e-3", "--seed", "1", "--quiet"]
    small += [part for setting in ("d=8", "max_length=6", "epochs=1") for part in ("--set", setting)]
    whole = tmp_path / "whole"
    fit = [sys.executable, "-m", "dpformer", "fit", data, *small, "--run"]
    assert strace(*fit, whole, log=tmp_path / "log").returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    (process,) = {line.split()[0] for line in lines if "release.partial" in line and "rename" in line}
    calls = [line for line in lines if line.split()[0] == process]
    written = next(n for n, line in enumerate(calls) if "rename" in line and ".release.partial" in line)
    places = {
        "secrets": next(n for n, line in enumerate(calls) if n > written and "unlink" in line),
        "model": next(n for n, line in enumerate(calls) if "rename" in line and "whole/model.safetensors" in line),
    }
    for name, place in places.items():
        folder = tmp_path / name
        kind = calls[place].split()[1].partition("(")[0]
        count = sum(line.split()[1].startswith(f"{kind}(") for line in calls[: place + 1])
        done = strace(f"--inject={kind}:signal=SIGKILL:when={count}", *fit, folder)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (folder / "private" / "release").is_dir()
        assert not (folder / "model.safetensors").exists()
        assert holds_secrets(folder) == (name == "secrets")
        assert not assert_safe(folder, dpformer)
        assert_cured(folder, whole, dpformer)


# Folders that nothing opens


def test_a_checkpoint_beside_a_finished_model_is_refused_and_cured(ready, tmp_path, dpformer):
    begun, whole = ready
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    assert is_open(folder)
    shutil.copytree(begun / "private", folder / "private")
    said = list(openers(folder, dpformer))
    assert all("holds secret state of its run (private/, keys of the noise) beside the model" in one for one in said)
    # Half of a checkpoint is one too.
    (checkpoint,) = (folder / "private").iterdir()
    checkpoint.rename(folder / "private" / f".{checkpoint.name}.partial")
    assert all("beside the model" in one for one in openers(folder, dpformer))
    assert not assert_safe(folder, dpformer)
    assert_cured(folder, whole, dpformer)


def test_fit_does_not_end_the_run_of_somebody_else(ready, tmp_path, data, dpformer):
    begun, whole = ready
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.copytree(begun / "private", folder / "private")
    done = dpformer("fit", data, "--run", folder, "--quiet")
    assert done.code == 2
    assert "exists already" in done.err
    assert (folder / "private").is_dir()


def test_a_folder_of_the_old_format_opens_in_show_only(ready, tmp_path, dpformer):
    _, whole = ready
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    config["version"] = 1
    config["recipe"]["noise"] = "system"
    (folder / "config.json").write_text(json.dumps(config))
    shown = dpformer("show", folder)
    assert shown.code == 0
    assert "INSECURE" in shown.out
    assert "noise leaks" in shown.out
    assert "fit again" in shown.out
    assert "noise leaks" in json.loads(dpformer("show", folder, "--json").out)["insecure"]
    said = [one for one in openers(folder, dpformer) if one]
    assert len(said) == 11  # all but the two of `show`
    assert all("noise leaks" in one and "fit again" in one for one in said)
    for function in (resume, finish_written):
        shutil.copytree(folder, tmp_path / function.__name__)
        (tmp_path / function.__name__ / "private").mkdir()
        with pytest.raises(DPFormerError, match="noise leaks"):
            function(tmp_path / function.__name__)
    assert "noise leaks" in dpformer("resume", folder).err
    config["version"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert all("is of format 3, not 2; update dpformer" in one for one in openers(folder, dpformer))


def test_keys_of_a_seed_are_those_searched_for():
    keys = Keys(1)
    for k in range(SECRETS):
        assert keys.state()["secret"].encode() == secrets()[2 * k + 1]
        keys.ratchet()
