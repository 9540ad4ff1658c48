"""A run that is interrupted anywhere goes on as if it had not been, and spends nothing twice."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch

from dpformer.errors import PrivacyError
from dpformer.privacy import Curator, read_ledger
from tests.training.support import Rows, begin, losses, small_model, train, weights


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def whole_run(folder, **options):
    model = small_model()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
    return begin(folder, model, steps=6, optimizer=optimizer, scheduler=scheduler, **options)


def test_a_run_that_was_closed_goes_on_to_the_same_weights(tmp_path):
    straight = whole_run(tmp_path / "straight", batch_size=30)
    drawn = train(straight)
    first = whole_run(tmp_path / "run", batch_size=30)
    seen = train(first, most=2)
    first.close()
    again = whole_run(tmp_path / "run", batch_size=30)
    assert again.steps_made == 2
    seen += train(again)
    assert seen == drawn
    assert torch.equal(weights(again.model), weights(straight.model))
    assert read_ledger(tmp_path / "run").steps_charged == 6
    assert again.statement.steps.charged == 6
    assert again.movement.distance == pytest.approx(straight.movement.distance)


class CrashError(Exception):
    """The process ends here."""


class Crashes(Curator):
    """Ends after the answer of step number `at` was charged, before anybody sees it."""

    at = 3

    def ask(self, query):
        answer = super().ask(query)
        if self.keys.place == self.at:
            raise CrashError
        return answer


def test_steps_that_were_charged_and_lost_are_made_again_at_no_cost(tmp_path):
    straight = whole_run(tmp_path / "straight")
    train(straight)
    first = whole_run(tmp_path / "run", make_curator=Crashes, checkpoint_seconds=math.inf)
    with pytest.raises(CrashError):
        train(first)
    with pytest.raises(PrivacyError, match="was interrupted; start the program again"):
        first.step(lambda: losses(first.model, (None, torch.zeros(1, 5))))
    first._run.close()  # as the end of a process does
    assert read_ledger(tmp_path / "run").steps_charged == 3
    with pytest.raises(PrivacyError, match="micro_batch 7 as before, not 9"):
        whole_run(tmp_path / "run", micro_batch=9)
    again = whole_run(tmp_path / "run")
    assert again.steps_made == 0  # the one checkpoint is that of the start
    train(again)
    assert read_ledger(tmp_path / "run").steps_charged == 6
    assert torch.equal(weights(again.model), weights(straight.model))


def test_another_sum_at_a_place_that_was_charged_is_refused(tmp_path):
    first = whole_run(tmp_path / "run", make_curator=Crashes, checkpoint_seconds=math.inf)
    with pytest.raises(CrashError):
        train(first)
    first._run.close()
    again = whole_run(tmp_path / "run", dataset=Rows(seed=2))
    with pytest.raises(PrivacyError, match="charged for another sum"):
        train(again)
    assert read_ledger(tmp_path / "run").steps_charged == 3


def test_an_error_in_the_loop_loses_nothing(tmp_path):
    private = whole_run(tmp_path / "run", checkpoint_seconds=math.inf)

    def loop():
        for batch in private:
            if private.step(lambda batch=batch: losses(private.model, batch)) and private.steps_made == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    private._run.close()
    assert whole_run(tmp_path / "run").steps_made == 4


def test_a_finished_run_gives_its_weights_and_no_batches(tmp_path):
    private = whole_run(tmp_path / "run")
    train(private)
    model = small_model(9)
    again = begin(tmp_path / "run", model, steps=6, optimizer=adam(model))
    assert list(again) == []
    assert torch.equal(weights(model), weights(private.model))
    assert again.statement == private.statement
    assert again.steps_made == 6


def test_a_run_that_ended_while_it_was_released_is_finished(tmp_path, monkeypatch):
    private = whole_run(tmp_path / "run")
    monkeypatch.setattr("dpformer.training.run.complete", lambda path: (_ for _ in ()).throw(CrashError))
    with pytest.raises(CrashError):
        train(private)
    private._run.close()
    monkeypatch.undo()
    again = whole_run(tmp_path / "run")
    assert list(again) == []
    assert torch.equal(weights(again.model), weights(private.model))


def test_new_keys_are_drawn_for_a_new_run(tmp_path):
    ends = []
    for name in "ab":
        private = begin(tmp_path / name, seed=None)
        train(private)
        ends.append(weights(private.model))
        assert not private.statement.insecure
    assert not torch.equal(*ends)
    seeded = begin(tmp_path / "c")
    train(seeded)
    assert "INSECURE" in seeded.statement.text()


class Augmented(Rows):
    """Rows with random numbers of all three kinds."""

    def __getitem__(self, place):
        own = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])
        return place, torch.cat([self.rows[place][:2], own])


def test_random_numbers_of_a_person_depend_on_person_and_step_alone(tmp_path):
    def nobody_but(people, key, users, rate):
        return np.array(people)

    seen = []
    for n, (people, workers) in enumerate((([3, 5, 8], 0), ([5, 8], 0), ([5, 8], 1))):
        draw = partial(Curator, draw=partial(nobody_but, people))
        private = begin(tmp_path / f"{n}", dataset=Augmented(), make_curator=draw, num_workers=workers)
        before = torch.get_rng_state()
        batch = next(iter(private))
        assert torch.equal(before, torch.get_rng_state())
        seen.append({int(place): row.tolist() for place, row in zip(*batch, strict=True)})
        private.close()
    assert seen[0][5] == seen[1][5] == seen[2][5]
    assert len({tuple(row[2:]) for row in seen[0].values()}) == 3
