"""Interrupted anywhere, a run goes on bit for bit, charges nothing twice, and never charges too little."""

import errno
import json
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpformer import load_model
from dpformer.artifact import write as write_module
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.fit import folder as folder_module
from dpformer.fit.folder import finish_written
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.fit.workers import Worker
from dpformer.privacy import Curator, parse_statement, read_ledger
from dpformer.privacy.noise import poisson_draw
from tests.fit.conftest import plant_worker
from tests.fit.test_step import without
from tests.recipes import small_recipe

KINDS = {
    "transformer": {"dropout": 0.2, "reattention": "logits"},
    "literal": {"reattention": "literal", "norm": "post", "blocks": 2},
    "accumulated": {"reattention": "accumulated"},
    "gru": {"model": "gru", "dropout": 0.2},
    "lstm": {"model": "lstm"},
    "full": {"batch_size": 60, "epochs": 10.0},
    "flat": {"max_norm": 0.5},
    "pure": {"vocabulary": 7, "recency": 0.8, "batch_size": 60, "epochs": 10.0},
    "not private": {"epsilon": float("inf"), "dropout": 0.1},
}


def train(folder: Path, data: Path, recipe: Recipe) -> Path:
    """A run without interruption."""
    assert start(folder, data, recipe).train()
    return folder


def stop_after(run, steps: int) -> None:
    """Ask to stop after so many more steps."""
    last = run.step + steps
    assert not run.train(should_stop=lambda: run.step == last)
    run.close()


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(folder: Path, whole: Path) -> None:
    """The same bits in the model, the same steps in the events, each charge once."""
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (folder / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()
    assert not (folder / "private").exists()
    if (whole / "ledger.jsonl").exists():
        assert read_ledger(folder).entries == read_ledger(whole).entries


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data) -> Path:
    """The uninterrupted run of `small_recipe()`."""
    return train(tmp_path_factory.mktemp("whole") / "run", data, small_recipe())


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, tmp_path, data):
    recipe = small_recipe(**KINDS[kind])
    whole = train(tmp_path / "whole", data, recipe)
    stop_after(start(tmp_path / "run", data, recipe), 3)
    torch.manual_seed(99)  # what else the process draws must not matter
    stop_after(resume(tmp_path / "run"), 4)
    torch.manual_seed(98)
    assert resume(tmp_path / "run").train()
    assert_same(tmp_path / "run", whole)


def test_another_seed_gives_another_model(tmp_path, data, whole):
    other = train(tmp_path / "run", data, small_recipe(seed=2))
    assert not torch.equal(model_of(other)["embedding.weight"], model_of(whole)["embedding.weight"])


def test_without_a_seed_a_replay_is_the_same_and_free(tmp_path, data):
    recipe = small_recipe(seed=None)
    stop_after(start(tmp_path / "run", data, recipe), 3)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for folder in ("run", "copy"):
        assert resume(tmp_path / folder).train()
    assert_same(tmp_path / "run", tmp_path / "copy")
    other = train(tmp_path / "other", data, recipe)
    # The histogram of the same data, and nothing in the ledger that shows that it is.
    assert read_ledger(other).entries[0].tag != read_ledger(tmp_path / "run").entries[0].tag
    assert (other / "model.safetensors").read_bytes() != (tmp_path / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("step", range(1, 11))
def test_a_stop_after_any_step(step, tmp_path, data, whole):
    stop_after(start(tmp_path / "run", data, small_recipe()), step)
    assert read_ledger(tmp_path / "run").steps_charged == step
    assert resume(tmp_path / "run").train()
    assert_same(tmp_path / "run", whole)


# Calls of `os` that touch the disk.
DISK = ("fsync", "replace", "rename", "mkdir", "open", "unlink", "rmdir")


class Killed(BaseException):
    """Nothing in the package may catch this and tidy up: it stands for a kill -9."""


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Die at the `number`-th call that touches the disk; returns what was called."""
    calls: list[str] = []

    def wrap(name: str, real):
        def called(*arguments, **options):
            calls.append(name)
            if len(calls) == number:
                raise Killed
            return real(*arguments, **options)

        return called

    for name in DISK:
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    return calls


def attempt(monkeypatch, number: int, folder: Path, data: Path, recipe: Recipe) -> tuple[bool, int]:
    """Start or resume and train with a checkpoint after every step, dying at a call; whether it lived, and all calls."""
    run = None
    with monkeypatch.context() as patched:
        calls = die_at(patched, number)
        try:
            if not (folder / "private").exists():
                run = start(folder, data, recipe)
            elif not finish_written(folder):
                run = resume(folder)
            if run is not None:
                run.train(checkpoint_seconds=-1.0)
        except Killed:
            pass
    if run is not None:
        run.close()
    return len(calls) < number, len(calls)


def test_death_at_every_call_that_touches_the_disk(tmp_path, data, monkeypatch):
    """Each place once, from the start to the end; the next process always ends with the same model."""
    recipe = small_recipe(epochs=0.5)  # 2 steps
    whole = train(tmp_path / "whole", data, recipe)
    lived, total = attempt(monkeypatch, 10**9, tmp_path / "count", data, recipe)
    assert lived
    assert total > 60
    ends = {"never began": 0, "resumed": 0, "finished": 0}
    for number in range(1, total + 1):
        folder = tmp_path / f"run-{number}"
        lived, _ = attempt(monkeypatch, number, folder, data, recipe)
        if lived:
            continue
        try:
            run = resume(folder)
        except PrivacyError:
            raise
        except DPFormerError as error:
            finished = "is finished" in str(error)
            ends["finished" if finished else "never began"] += 1
            if finished:
                assert_same(folder, whole)
                load_model(folder)  # its statement is there
            elif (folder / "ledger.head").exists():  # nothing can have been released yet
                assert not read_ledger(folder).entries
            continue
        assert not (folder / "model.safetensors").exists()
        assert run.train()
        ends["resumed"] += 1
        assert_same(folder, whole)
        load_model(folder)
    assert min(ends.values()) > 0, ends


def test_a_second_death_during_the_resume(tmp_path, data, monkeypatch, whole):
    recipe, dice = small_recipe(), random.Random(0)
    folder = tmp_path / "run"
    stop_after(start(folder, data, recipe), 2)
    for _ in range(12):
        if not (folder / "private").exists():
            break
        attempt(monkeypatch, dice.randint(1, 25), folder, data, recipe)
    if (folder / "private").exists() and not finish_written(folder):
        assert resume(folder).train()
    assert_same(folder, whole)


def test_kill_9_at_random_moments(tmp_path, data, monkeypatch, whole):
    """Real processes, killed while they resume, train, write checkpoints and release: at a call to the disk, not by the clock."""
    dataset = folder_module.load(data)
    packed = write_module.pack_catalogue(dataset.catalogue)
    # polars does not survive a fork.
    monkeypatch.setattr(folder_module, "load", lambda folder: dataset)
    monkeypatch.setattr(write_module, "pack_catalogue", lambda catalogue: packed)
    dice = random.Random(1)
    first = tmp_path / "first"
    start(first, data, small_recipe()).close()
    killed = 0
    for n in range(6):
        folder = tmp_path / f"run-{n}"
        shutil.copytree(first, folder)
        charged = 0
        while (folder / "private").exists():
            number = dice.randint(1, 90)
            child = os.fork()
            if child == 0:
                _go_on_until(number, folder)
            _, status = os.waitpid(child, 0)
            killed += os.WIFSIGNALED(status)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
            now = read_ledger(folder).steps_charged
            events = folder / "events.jsonl"
            lines = events.read_text().splitlines(True) if events.exists() else []
            seen = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
            assert charged <= now <= 10
            assert now >= max(seen, default=0)  # what was made was charged
            charged = now
        assert_same(folder, whole)
    assert killed >= 6


def _go_on_until(number: int, folder: Path) -> None:
    """In a child: go on with a run, with a checkpoint after every step, and be killed at the `number`-th call to the disk."""
    code, calls = 1, iter(range(1, 10**9))

    def wrap(real):
        def called(*arguments, **options):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return called

    try:
        for name in DISK:
            setattr(os, name, wrap(getattr(os, name)))
        torch.set_num_threads(1)
        if not finish_written(folder):
            resume(folder).train(checkpoint_seconds=-1.0)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "write"])
def test_a_full_disk_leaves_the_last_good_checkpoint(call, tmp_path, data, monkeypatch, whole):
    folder = tmp_path / "run"
    stop_after(start(folder, data, small_recipe()), 4)
    kept = {path: path.read_bytes() for path in (folder / "private").rglob("*") if path.is_file()}
    run = resume(folder)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if call == "write":
            patched.setattr(os, "fdopen", full)
        else:
            patched.setattr(os, call, full)
        with pytest.raises(DPFormerError, match=r"cannot be written \(No space left on device\)") as error:
            run.train(checkpoint_seconds=-1.0)
    assert "\n" not in str(error.value)
    run.close()
    assert {path: path.read_bytes() for path in (folder / "private").rglob("*") if path.is_file()} == kept
    assert resume(folder).train()
    assert_same(folder, whole)


def test_an_exception_while_training_leaves_the_last_checkpoint(tmp_path, data, whole):
    run = start(tmp_path / "run", data, small_recipe())

    def trouble(progress) -> None:
        if progress.report and progress.done == 5:
            raise RuntimeError("the display broke")

    with pytest.raises(RuntimeError, match="display"):
        run.train(trouble)
    run.close()
    assert resume(tmp_path / "run").train()
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_before_and_after_the_histogram(moment, tmp_path, data, whole):
    class Dying(Curator):
        def ask(self, query):
            if moment == "after":
                super().ask(query)
            raise Killed

    folder = tmp_path / "run"
    run = start(folder, data, small_recipe(), make_curator=Dying)
    with pytest.raises(Killed):
        run.train()
    run.close()
    assert len(read_ledger(folder).entries) == (moment == "after")
    assert resume(folder).train()
    assert_same(folder, whole)


def test_a_statement_says_what_the_ledger_says(whole):
    account, statement = read_ledger(whole), parse_statement((whole / "privacy.json").read_bytes())
    assert (statement.steps.charged, statement.ledger.run_id) == (10, account.run_id)
    assert (statement.ledger.entries, statement.ledger.hash) == (11, account.position.hash)
    assert [release.name for release in statement.releases] == ["histogram"]
    # Rounded up to some digits, never down.
    assert account.plan.total.epsilon <= statement.epsilon <= min(20, account.plan.total.epsilon * 1.001)


def test_a_run_keeps_its_number_of_threads(tmp_path, data):
    """With another number, sums would be rounded in another order, and replayed steps would not be the same release."""
    before = torch.get_num_threads()
    try:
        stop_after(start(tmp_path / "run", data, small_recipe()), 2)
        torch.set_num_threads(before + 1)
        resume(tmp_path / "run").close()
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_a_rolled_back_ledger_is_refused(tmp_path, data):
    folder = tmp_path / "run"
    run = start(folder, data, small_recipe())
    run.begin_steps()
    early = {name: (folder / name).read_bytes() for name in ("ledger.jsonl", "ledger.head")}
    stop_after(run, 5)
    for name, content in early.items():
        (folder / name).write_bytes(content)
    with pytest.raises(PrivacyError, match="cut off"):
        resume(folder)


def test_other_data_and_a_second_process_are_refused(tmp_path, data):
    from dpformer.data import prepare, save
    from tests.fit.conftest import small_log

    folder = tmp_path / "run"
    run = start(folder, data, small_recipe())
    with pytest.raises(PrivacyError, match="in use by another process"):
        resume(folder)
    run.close()
    save(prepare(small_log(seed=5)), tmp_path / "other")
    with pytest.raises(DPFormerError, match="is not the data that the run began with"):
        resume(folder, tmp_path / "other")
    shutil.copytree(data, tmp_path / "moved")
    assert resume(folder, tmp_path / "moved").train()
    with pytest.raises(DPFormerError, match="is finished"):
        resume(folder)
    with pytest.raises(DPFormerError, match="exists already"):
        start(folder, data, small_recipe())


def test_the_state_of_an_unfinished_run_is_for_its_owner_only(tmp_path, data):
    before = os.umask(0)
    try:
        run = start(tmp_path / "run", data, small_recipe())
        stop_after(run, 2)
    finally:
        os.umask(before)
    private = tmp_path / "run" / "private"
    paths = [private, *private.rglob("*")]
    assert len(paths) > 3
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    # Nothing outside of it tells the noise or the sample to come.
    values = json.loads(next(private.rglob("state.json")).read_text())
    secret = values["keys"]["secret"]
    assert len(bytes.fromhex(secret)) == 32
    outside = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and private not in p.parents]
    for path in outside:
        content = path.read_bytes()
        assert secret.encode() not in content, path
        assert bytes.fromhex(secret) not in content, path


def test_a_checkpoint_holds_no_key_of_earlier_answers(tmp_path, data):
    """The histogram and four steps: after each, the secret that its noise was made from is gone."""
    run = start(tmp_path / "run", data, small_recipe(seed=None))
    first = json.loads(next((tmp_path / "run" / "private").rglob("state.json")).read_text())["keys"]["secret"]
    run.begin_steps()
    past = [first]
    for place in range(1, 5):
        state = run.curator.keys.state()
        assert state["place"] == place
        run.save()
        kept = b"".join(path.read_bytes() for path in (tmp_path / "run" / "private").rglob("*") if path.is_file())
        assert state["secret"].encode() in kept  # so the search would find one
        for secret in past:
            assert secret.encode() not in kept
            assert bytes.fromhex(secret) not in kept
        past.append(state["secret"])
        run.trainer.make_step(run.curator)
    assert len(set(past)) == 5
    run.close()


class Larger(Worker):
    """A defect: gradients 1.5 times as large."""

    def add(self, batch, masks=None):
        loss = super().add(batch, masks)
        for p in self.model.parameters():
            p.grad *= 1.5
        return loss


@pytest.mark.parametrize("what", ["gradients", "sample", "data"])
def test_a_resumed_run_that_makes_another_sum_is_refused(what, tmp_path, data, whole):
    """Five steps are charged that the checkpoint does not know; they are made again, and must be the same."""
    folder = tmp_path / "run"
    run = start(folder, data, small_recipe())

    def trouble(progress) -> None:
        if progress.report and progress.done == 5:
            raise Killed

    run.begin_steps()
    run.save()
    with pytest.raises(Killed):
        run.train(trouble)
    run.close()
    other = partial(Curator, draw=lambda key, users, rate: poisson_draw(key[::-1], users, rate))
    again = resume(folder, make_curator=other if what == "sample" else Curator)
    if what == "gradients":
        plant_worker(again, Larger)
    elif (
        what == "data"
    ):  # events are gone of people of whom one is drawn; the file is checked too, so this is another way in
        for person in range(10):
            again.curator._people = without(again.curator._people, person)
    with pytest.raises(PrivacyError, match=r"was charged for another sum than the one made now"):
        again.train()
    again.close()
    assert read_ledger(folder).steps_charged == 5
    assert not (folder / "model.safetensors").exists()
    assert resume(folder).train()
    assert_same(folder, whole)


def test_a_damaged_checkpoint_is_one_line(tmp_path, data):
    stop_after(start(tmp_path / "run", data, small_recipe()), 2)
    state = next((tmp_path / "run" / "private").rglob("state.safetensors"))
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(DPFormerError, match="is damaged") as error:
        resume(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_reattention_knows_the_released_frequencies(tmp_path, data):
    """The errors that a released model corrects for come from the histogram and the plan alone."""
    folder = train(tmp_path / "run", data, small_recipe(reattention="logits"))
    tensors, plan = model_of(folder), read_ledger(folder).plan
    p = tensors["frequencies"][1:]
    expected = (plan.noise_multiplier / plan.batch_size / p) ** 2
    torch.testing.assert_close(tensors["var_items"][1:], expected, rtol=1e-5, atol=0)
    assert np.isfinite(tensors["var_items"].numpy()).all()


def test_reattention_has_the_noise_that_the_optimizer_tracked(tmp_path, data):
    """The released errors of a seeded run are those of its last step, and of the size of what one step adds."""
    run = start(tmp_path / "run", data, small_recipe(reattention="accumulated"))
    assert run.train()
    tracked = dict(
        zip(dict(run.trainer.model.named_parameters()), run.trainer.optimizer.noise_variances(), strict=True)
    )
    tensors = model_of(tmp_path / "run")
    torch.testing.assert_close(tensors["var_items"][1:], tracked["embedding.weight"][1:, 0])
    torch.testing.assert_close(tensors["var_positions"], tracked["positions"][:, 0])
    rate = run.trainer.how.rate_at(2, run.plan.steps)
    assert (tensors["var_items"][1:] > 0.01 * rate**2).all()
    assert (tensors["var_items"][1:] < run.plan.steps**2 * rate**2).all()  # no divisor is below the noise
