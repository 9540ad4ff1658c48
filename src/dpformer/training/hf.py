"""`PrivateTrainer`: Hugging Face's Trainer whose steps are those of `PrivateTraining`. Needs `pip install 'dpformer[hf]'`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from dpformer.errors import PrivacyError
from dpformer.privacy.plan import declared_users, steps_of
from dpformer.training.people import group_people
from dpformer.training.private import PrivateTraining

PersonLosses = Callable[[nn.Module, dict[str, Any]], Tensor]

# Arguments that would change what a step is, the value that they must have, and what to do instead.
_REFUSED = {
    "gradient_accumulation_steps": (1, "give batch_size=, the people expected in a step: micro-batches are made here"),
    "fp16": (False, "private steps are made in float32"),
    "bf16": (False, "private steps are made in float32"),
    "gradient_checkpointing": (False, "lower per_device_train_batch_size, which costs nothing but time"),
    "auto_find_batch_size": (False, "lower per_device_train_batch_size by hand"),
    "load_best_model_at_end": (False, "choosing a step by a loss on people's data is not paid for"),
    "label_smoothing_factor": (0.0, "give losses=, with the smoothing in it"),
    "neftune_noise_alpha": (None, "random numbers of a whole batch change everybody's when one person leaves"),
    "group_by_length": (False, "people are drawn, each by itself"),
    "train_sampling_strategy": ("random", "people are drawn, each by itself"),
    "deepspeed": (None, "start one process"),
    "fsdp": (None, "start one process"),
}


class PrivateTrainer(Trainer):
    """Trains with differential privacy for each person of `train_dataset`; see `PrivateTraining` for what is guaranteed.

        private = {"epsilon": 8, "delta": 1e-5, "batch_size": 512}
        trainer = PrivateTrainer(model, args, train_dataset=people, private=private)
        trainer.train()
        print(trainer.private.statement.text())

    Of `args` it takes the number of epochs or steps, per_device_train_batch_size (people at a time, a matter of memory), the
    optimiser, learning rate, schedule, data loader workers and output_dir, in which `private/` is the run folder. max_grad_norm
    has no effect: each person's gradient is clipped. Nothing is logged that is computed on people's data without noise. What it
    cannot do is refused by name.

    Args:
        losses: from model and inputs to one loss for each person, `[people]`; by default the cross-entropy of the labels, a mean
            over each person's own positions.
        private: settings of `PrivateTraining`: epsilon, delta, batch_size, person, records_per_person, max_norm, population, ...
    """

    def __init__(
        self, model: nn.Module, args: Any, *, losses: PersonLosses | None = None, private: dict[str, Any], **rest: Any
    ) -> None:
        _refuse(args, rest)
        super().__init__(model=model, args=args, **rest)
        self._losses, self._settings = losses or label_losses, private
        self.private: PrivateTraining | None = None

    def train(self, *args_: Any, **rest: Any) -> TrainOutput:
        """Train from the beginning, or from where a run in the same output_dir was interrupted."""
        if args_ or rest:
            raise PrivacyError("leave the arguments of train() out: a run goes on by itself in the same output_dir")
        args: Any = self.args
        model: Any = self.model
        data = self.train_dataset
        given: list[Any] = [self._settings.get(name) for name in ("person", "records_per_person", "combine")]
        people = declared_users(len(group_people(data, *given)), self._settings.get("population"))
        planned = steps_of(args.num_train_epochs, people, self._settings["batch_size"])
        steps = args.max_steps if args.max_steps > 0 else planned
        self.create_optimizer_and_scheduler(num_training_steps=steps)
        optimizer: Any = self.optimizer
        self._schedule: Any = self.lr_scheduler
        model.eval()  # no dropout
        settings: dict[str, Any] = {
            **{"steps": steps, "scheduler": self.lr_scheduler, "run": Path(args.output_dir) / "dp-run"},
            **{"micro_batch": args.per_device_train_batch_size, "num_workers": args.dataloader_num_workers},
            "collate_fn": self._get_collator_with_removed_columns(self.data_collator, description="training"),
        }
        self.private = private = PrivateTraining(model, optimizer, data, **settings, **self._settings)
        self.state.max_steps, self.state.global_step = steps, private.steps_made
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        for batch in private:
            inputs: Any = self._prepare_inputs(batch)
            if private.step(partial(self._losses, model, inputs)):
                self._after_step(private)
            if self.control.should_training_stop:
                private.close()
                break
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        if private.movement is not None:
            self.save_model()
        return TrainOutput(private.steps_made, float("nan"), {})

    def push_to_hub(self, *args_: Any, **rest: Any) -> Any:
        """As of Trainer, when the run is finished: until then output_dir holds the keys of the noise."""
        if self.private is None or self.private.steps_made < self.private.plan.steps:
            raise PrivacyError(
                "the run is not finished, and its folder holds the keys of the noise; call train() to its end"
            )
        return super().push_to_hub(*args_, **rest)

    def _after_step(self, private: PrivateTraining) -> None:
        self.state.global_step = private.steps_made
        self.state.epoch = private.steps_made * private.plan.rate
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log({"learning_rate": float(self._schedule.get_last_lr()[0])})
            self.control.should_log = False


def label_losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The cross-entropy of `labels`, a mean over each person's own labels; -100 is no label."""
    labels = inputs.get("labels")
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    if not isinstance(labels, Tensor) or logits.dim() not in (2, 3) or logits.shape[-1] == 1:
        raise PrivacyError(
            "the losses of this model are not known: give losses=, a function of (model, inputs) to one for each person"
        )
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels, reduction="none")
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return each.sum(1) / (labels != -100).sum(1).clamp_min(1)


def _refuse(args: Any, rest: dict[str, Any]) -> None:
    """What a Trainer can do and private training cannot, by name."""
    for name, (wanted, cure) in _REFUSED.items():
        if (value := getattr(args, name, wanted)) != wanted and value:
            raise PrivacyError(f"TrainingArguments.{name} is {value!r}; with privacy it must be {wanted!r}: {cure}")
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        raise PrivacyError("TrainingArguments.eval_strategy must be 'no': call evaluate() after train()")
    collator = type(rest.get("data_collator")).__name__
    if "Flattening" in collator or getattr(rest.get("data_collator"), "padding_free", False):
        raise PrivacyError(
            f"{collator} joins people into one row, so that their gradients cannot be told apart: pad them instead"
        )
    tokenizer = getattr(rest.get("data_collator"), "tokenizer", None) or rest.get("processing_class")
    if getattr(tokenizer, "padding_side", "right") == "left":
        raise PrivacyError(
            "the tokenizer pads on the left, so that the longest person of a batch moves the positions of the others: set "
            "padding_side = 'right'"
        )
    if rest.get("compute_loss_func") is not None:
        raise PrivacyError("compute_loss_func gives one loss for the batch; give losses=, one for each person")
    if args.n_gpu > 1 or args.world_size > 1:
        raise PrivacyError(
            "several devices or processes: each would spend the whole budget on the same people; start one on one"
        )
