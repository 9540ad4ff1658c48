"""Each way to hold the loop wrongly is refused, before anything more is charged."""

from functools import partial

import pytest
import torch
from torch import nn

from dpformer.errors import ClippingError, DataError, DPFormerError, PrivacyError
from dpformer.privacy import read_ledger
from tests.training.support import Rows, begin, losses, small_model, train, weights


def charged(private) -> int:
    return read_ledger(private.run).steps_charged


def step(private, batch) -> bool:
    return private.step(lambda: losses(private.model, batch))


def make_step(private, batches, batch) -> None:
    while not step(private, batch):
        batch = next(batches)


def test_steps_beyond_the_plan(tmp_path):
    private = begin(tmp_path / "run")
    batch = next(iter(begin(tmp_path / "other")))
    train(private)
    assert list(private) == []
    with pytest.raises(PrivacyError, match="all 3 steps of the plan are made"):
        step(private, batch)
    for p in private.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(PrivacyError, match="all steps of the plan are made"):
        private.optimizer.step()
    assert charged(private) == 3


def test_a_batch_is_stepped_once(tmp_path):
    private = begin(tmp_path / "run")
    batches = iter(private)
    batch = next(batches)
    step(private, batch)
    with pytest.raises(PrivacyError, match="once for each batch"):
        step(private, batch)
    assert charged(private) == 0


def test_leaving_out_a_micro_batch(tmp_path):
    private = begin(tmp_path / "run")
    batches = iter(private)
    next(batches)
    with pytest.raises(PrivacyError, match="step was not called for the last batch"):
        next(batches)
    assert charged(private) == 0


def test_two_loops_at_once(tmp_path):
    private = begin(tmp_path / "run")
    first, second = iter(private), iter(private)
    next(first)
    batch = next(second)
    with pytest.raises(PrivacyError, match="another loop"):
        next(first)
    step(private, batch)


def test_a_loop_that_was_left_begins_its_step_again(tmp_path):
    private = begin(tmp_path / "run")
    left = next(iter(private))
    drawn = train(private)
    assert drawn[0][: len(left[0])] == left[0].tolist()
    assert len(drawn) == charged(private) == 3


@pytest.mark.parametrize("wrong", ["mean", "one more", "a number", "per token"])
def test_a_loss_that_is_not_one_for_each_person(tmp_path, wrong):
    private = begin(tmp_path / "run")
    batch = next(iter(private))

    def compute():
        value = losses(private.model, batch)
        return {"mean": value.mean(), "one more": torch.cat([value, value[:1]]), "a number": 1.0}.get(
            wrong, value[:, None].expand(-1, 3)
        )

    with pytest.raises(PrivacyError, match="one number for each person"):
        private.step(compute)
    assert charged(private) == 0


def test_gradients_that_it_did_not_make(tmp_path):
    private = begin(tmp_path / "run")
    batch = next(iter(private))
    losses(private.model, batch).sum().backward()
    with pytest.raises(PrivacyError, match=r"'0.weight' has a gradient that was not made here; leave out backward"):
        step(private, batch)
    private.optimizer.zero_grad()
    step(private, batch)


def test_a_backward_pass_inside_of_the_loss_reaches_no_parameter(tmp_path):
    ends = []
    for inside in (False, True):
        private = begin(tmp_path / f"{inside}")

        def compute(batch, private=private, inside=inside):
            if inside:
                losses(private.model, (None, Rows().rows)).sum().backward()
            return losses(private.model, batch)

        for batch in private:
            private.step(partial(compute, batch))
        ends.append(weights(private.model))
    assert torch.equal(*ends)


def test_a_step_of_the_optimiser(tmp_path):
    private = begin(tmp_path / "run")
    for batch in private:
        step(private, batch)
        with pytest.raises(PrivacyError, match=r"private\.step makes its steps"):
            private.optimizer.step()
        break
    private.close()
    private.optimizer.step()


def add(value: torch.Tensor) -> None:
    with torch.no_grad():
        value.add_(1e-3)


def behind_autograd(value: torch.Tensor) -> None:
    value.data[0] += 1e-3


@pytest.mark.parametrize("change", [add, behind_autograd])
@pytest.mark.parametrize("name", ["0.weight", "2.bias", "frozen", "buffer"])
def test_weights_that_change_outside_of_steps(tmp_path, change, name):
    model = small_model()
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    model.register_buffer("buffer", torch.zeros(3))
    trained = [p for p in model.parameters() if p.requires_grad]
    private = begin(tmp_path / "run", model, optimizer=torch.optim.SGD(trained, lr=0.1))

    def loop() -> None:
        for batch in private:
            if step(private, batch):
                change(model.state_dict()[name])

    with pytest.raises(PrivacyError, match=f"'{name}' of the model has changed outside"):
        loop()
    assert charged(private) == 1
    with pytest.raises(PrivacyError, match="has changed outside"):
        private.save()


def test_a_buffer_that_remembers_batches(tmp_path):
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x):
            self.mean.lerp_(x.mean(0), 0.1)
            return self.layer(x)

    private = begin(tmp_path / "run", Remembers())
    with pytest.raises(PrivacyError, match="'mean' of the model has changed"):
        train(private)
    assert charged(private) == 0


def test_an_optimiser_that_holds_other_parameters(tmp_path):
    model, other = small_model(), nn.Linear(2, 1)
    with pytest.raises(PrivacyError, match=r"shape \(1, 2\) that is not in the model"):
        begin(tmp_path, model, optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(PrivacyError, match=r"does not hold parameter '2\.weight'"):
        begin(tmp_path, model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    private = begin(tmp_path / "run", model)
    private.optimizer.add_param_group({"params": [*other.parameters()]})
    with pytest.raises(PrivacyError, match="not in the model"):
        train(private)
    assert charged(private) == 0


def test_a_parameter_that_is_added_or_thawed_later_would_get_no_noise(tmp_path):
    model = small_model()
    model[2].bias.requires_grad_(False)
    private = begin(tmp_path / "run", model, optimizer=torch.optim.SGD([*model.parameters()][:3], lr=0.1))
    model[2].bias.requires_grad_(True)
    with pytest.raises(PrivacyError, match="trains other parameters"):
        train(private)
    assert charged(private) == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("batch_size", 20), ("epsilon", 9.0), ("steps", 4), ("max_norm", 1.0), ("delta", 1e-4), ("population", 70)],
)
def test_a_setting_that_changes_on_resume(tmp_path, option, value):
    begin(tmp_path / "run").close()
    with pytest.raises(PrivacyError, match=f"this run began with {option} "):
        begin(tmp_path / "run", **{option: value})
    begin(tmp_path / "run").close()


def test_another_data_set_or_model_on_resume(tmp_path):
    begin(tmp_path / "run").close()
    with pytest.raises(PrivacyError, match="began with people 60 and records 60, not people 61"):
        begin(tmp_path / "run", dataset=Rows(61))
    with pytest.raises(PrivacyError, match="began with parameters"):
        begin(tmp_path / "run", nn.Linear(5, 1))
    model = small_model()
    model.register_buffer("extra", torch.ones(2))
    with pytest.raises(PrivacyError, match="frozen parameters or buffers are not those"):
        begin(tmp_path / "run", model)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DPFormerError, match="holds other files"):
        begin(tmp_path)


def test_two_objects_on_one_folder(tmp_path):
    first = begin(tmp_path / "run")
    with pytest.raises(PrivacyError, match="in use"):
        begin(tmp_path / "run")
    first.close()
    begin(tmp_path / "run").close()


def test_optimisers_schedulers_and_wrappers_that_cannot_be_private(tmp_path):
    model = small_model()
    with pytest.raises(PrivacyError, match="LBFGS"):
        begin(tmp_path, model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(PrivacyError, match=r"must be a torch\.optim\.Optimizer"):
        begin(tmp_path, model, optimizer="adam")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PrivacyError, match="without noise"):
        begin(tmp_path, model, optimizer=sgd, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd))
    with pytest.raises(PrivacyError, match="DataParallel"):
        begin(tmp_path, nn.DataParallel(model), optimizer=sgd)


def test_epochs_and_steps_and_streams(tmp_path):
    with pytest.raises(PrivacyError, match="either epochs or steps"):
        begin(tmp_path, epochs=1.0)
    with pytest.raises(DataError, match="map-style"):
        begin(tmp_path, dataset=iter([1]))
    with pytest.raises(PrivacyError, match="batch size 61"):
        begin(tmp_path / "run", batch_size=61)


def test_coarse_arithmetic_and_dropout(tmp_path):
    private = begin(tmp_path / "run", small_model().append(nn.Dropout(0.1)))
    with pytest.raises(PrivacyError, match="dropout"):
        train(private)
    with pytest.raises(ClippingError, match="float32"):
        begin(tmp_path / "half", small_model().half())


def test_a_loss_in_place_of_a_function(tmp_path):
    private = begin(tmp_path / "run")
    batch = next(iter(private))
    with pytest.raises(PrivacyError, match="step takes a function"):
        private.step(losses(private.model, batch))
    assert charged(private) == 0


def test_several_records_of_a_person_need_one_sample(tmp_path):
    with pytest.raises(DataError, match="need combine= or collate_fn="):
        begin(tmp_path / "run", person=[0, 0, *range(58)], records_per_person=2)


def test_entries_that_are_not_grouped_are_assumed_to_be_people(tmp_path):
    words = "each entry of the data set is another person"
    assert words in begin(tmp_path / "run").statement.text()
    grouped = begin(
        tmp_path / "grouped", person=list(range(60)), records_per_person=1, combine=lambda records: records[0]
    )
    assert words not in grouped.statement.text()


def test_commands_for_recommenders_refuse_the_folder(tmp_path, dpformer):
    train(begin(tmp_path / "run"))
    for command in ("show", "verify", "audit"):
        assert "is a run of PrivateTraining" in dpformer(command, tmp_path / "run").err


@pytest.mark.parametrize("kind", ["plateau", "by hand"])
def test_a_learning_rate_that_follows_losses(tmp_path, kind):
    """The usual call after an epoch. Losses have no noise, so the next step would tell of them."""
    private = begin(tmp_path / "run")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer, patience=0)
    batches = iter(private)
    make_step(private, batches, next(batches))
    loss, batch = private.report.mean_loss, next(batches)
    if kind == "plateau":
        for later in (loss, 2 * loss, 3 * loss):
            plateau.step(later)
    else:
        private.optimizer.param_groups[0]["lr"] /= 1 + loss
    with pytest.raises(PrivacyError, match=r"lr of the optimiser.*scheduler="):
        make_step(private, batches, batch)
    assert charged(private) == 1
