"""Hugging Face's Trainer over the same loop."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dpformer.errors import PrivacyError  # noqa: E402
from dpformer.privacy import read_ledger  # noqa: E402
from dpformer.training.hf import PrivateTrainer, label_losses  # noqa: E402

PRIVATE = {"epsilon": 8.0, "delta": 1e-3, "batch_size": 20, "seed": 1}


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(vocab_size=20, bos_token_id=1, eos_token_id=2, **sizes)
    return transformers.GPT2LMHeadModel(config)


def people():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 20, (40, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **options):
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.1,
        "use_cpu": True,
        "report_to": [],
    } | options
    return transformers.TrainingArguments(output_dir=str(folder), disable_tqdm=True, logging_steps=1, **options)


def test_it_trains_within_its_budget_and_goes_on(tmp_path):
    trainer = PrivateTrainer(gpt2(), arguments(tmp_path / "a"), train_dataset=people(), private=PRIVATE)
    result = trainer.train()
    assert result.global_step == 3
    assert read_ledger(tmp_path / "a" / "dp-run").steps_charged == 3
    assert "(8, 0.001)-differential privacy" in trainer.private.statement.text()
    assert trainer.private.movement.distance > 0.01
    assert all("loss" not in entry for entry in trainer.state.log_history)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a")
    torch.testing.assert_close(saved.state_dict(), trainer.model.state_dict())
    again = PrivateTrainer(gpt2(), arguments(tmp_path / "a"), train_dataset=people(), private=PRIVATE)
    again.train()  # finished: it takes the weights
    torch.testing.assert_close(again.model.state_dict(), trainer.model.state_dict())
    assert read_ledger(tmp_path / "a" / "dp-run").steps_charged == 3


def test_the_losses_are_those_of_each_person_alone():
    model = gpt2().eval()
    rows = torch.stack([one["input_ids"] for one in people()[:4]])
    labels = rows.clone()
    labels[1, 3:] = -100
    found = label_losses(model, {"input_ids": rows, "labels": labels})
    alone = [model(input_ids=rows[k : k + 1], labels=labels[k : k + 1]).loss for k in range(4)]
    torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2.*micro-batches are made here"),
        ({"bf16": True}, "bf16.*float32"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"eval_strategy": "steps"}, "eval_strategy"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path, options, match):
    with pytest.raises(PrivacyError, match=match):
        PrivateTrainer(gpt2(), arguments(tmp_path, **options), train_dataset=people(), private=PRIVATE)


def test_people_in_one_row_and_losses_of_a_batch_are_refused(tmp_path):
    rest = {"train_dataset": people(), "private": PRIVATE}
    with pytest.raises(PrivacyError, match="joins people into one row"):
        PrivateTrainer(gpt2(), arguments(tmp_path), data_collator=transformers.DataCollatorWithFlattening(), **rest)
    with pytest.raises(PrivacyError, match="one loss for the batch"):
        PrivateTrainer(gpt2(), arguments(tmp_path), compute_loss_func=lambda *a, **k: None, **rest)
    with pytest.raises(PrivacyError, match="leave the arguments"):
        PrivateTrainer(gpt2(), arguments(tmp_path), **rest).train(resume_from_checkpoint=True)


def test_padding_on_the_left_is_refused(tmp_path):
    """The longest person of a batch would move the positions of the others."""

    class Collator:
        class tokenizer:  # noqa: N801
            padding_side = "left"

    with pytest.raises(PrivacyError, match="pads on the left"):
        PrivateTrainer(gpt2(), arguments(tmp_path), data_collator=Collator(), train_dataset=people(), private=PRIVATE)


def test_a_run_that_is_not_finished_is_not_pushed(tmp_path):
    trainer = PrivateTrainer(gpt2(), arguments(tmp_path), train_dataset=people(), private=PRIVATE)
    with pytest.raises(PrivacyError, match="holds the keys of the noise"):
        trainer.push_to_hub()
