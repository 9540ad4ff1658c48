"""A run of the loop: its Curator, its checkpoints, and its end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.artifact.layout import MODEL
from dpformer.errors import PrivacyError
from dpformer.privacy import Answer, Curator, Keys, PrivacyPlan, PrivacyStatement, read_ledger
from dpformer.privacy.account import PeopleAccount
from dpformer.privacy.build import Circumstances, build_statement
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.statement import TuningPart
from dpformer.training.clipped_sum import trainable
from dpformer.training.folder import AVERAGE, TrainingFolder
from dpformer.training.people import People
from dpformer.training.state import pack_state, unpack_state
from dpformer.training.watch import everything, fingerprint

MakeCurator = Callable[..., Curator[People]]


@dataclass(frozen=True)
class Movement:
    """How far the trained parameters are from where they began, and the names of those that did not move."""

    distance: float
    start_norm: float
    still: tuple[str, ...]

    def text(self) -> str:
        """In one line."""
        part = f", {100 * self.distance / self.start_norm:.3g} % of their norm" if self.start_norm else ""
        still = f"; not moved at all: {', '.join(self.still)}" if self.still else ""
        return f"the weights moved by {self.distance:.4g}{part}{still}"


class TrainingRun:
    """Opens a new run or one that goes on. kept: beside the model, what checkpoints keep (optimizer, scheduler, average).

    sizes: of the data. They are not released: one person more or less changes them. account: of the people, charged before a new
    run asks anything. curator: None when the run is finished or closed.
    """

    def __init__(
        self,
        folder: TrainingFolder,
        model: nn.Module,
        kept: dict[str, Any],
        micro_batch: int,
        sizes: dict[str, int],
        account: PeopleAccount | None,
    ) -> None:
        self.folder, self.model, self.kept, self.account = folder, model, kept, account
        self.steps_made, self.public_steps = 0, 0
        self.curator: Curator[People] | None = None
        self.movement: Movement | None = None
        self._sizes = sizes
        self._fixed = {"micro_batch": micro_batch, "threads": torch.get_num_threads()}

    def open(
        self, people: People, plan: Callable[[], PrivacyPlan], keys: Callable[[], Keys], make_curator: MakeCurator
    ) -> PrivacyPlan:
        """Begin, or go on, or take the weights of a finished run. plan, keys: made for a new run. Returns the plan."""
        if self.folder.finished:
            take(self.folder.released(MODEL), self.model)
            if "average" in self.kept:
                take(self.folder.released(AVERAGE), self.kept["average"].module)
            stated = self.folder.statement()
            self.steps_made = stated.steps.charged if stated.steps is not None else 0
            return read_ledger(self.folder.path).plan if stated.private else plan()
        if self.folder.begun:
            own, ledger = self._restore()
            self.curator = make_curator(people, plan() if ledger is None else ledger.plan, ledger, own)
        else:
            new = plan()
            ledger = self.folder.begin(new, parameters(self.model), self.account)
            self.curator = make_curator(people, new, ledger, keys())
            self.save()
        return self.curator.plan

    def _restore(self) -> tuple[Keys, Ledger | None]:
        keys, ledger, tensors, values = self.folder.reopen()
        if values["sizes"] != self._sizes:
            raise PrivacyError(
                f"{self.folder.path}: this run began with {_in_words(values['sizes'])}, not {_in_words(self._sizes)}; give the "
                "same data, or begin another run in a folder of its own, which spends a budget of its own"
            )
        if values["frozen"] != _frozen(self.model):
            raise PrivacyError(
                f"{self.folder.path}: frozen parameters or buffers are not those that the run began with"
            )
        if ledger is not None and ledger.position().entries > keys.place:
            # These steps were charged; they are made again, and must come out the same.
            fixed, mine = values["fixed"], self._fixed["micro_batch"]
            if fixed["micro_batch"] != mine:
                before = f"micro_batch {fixed['micro_batch']} as before, not {mine}"
                raise PrivacyError(f"{self.folder.path}: charged steps are made again, which needs {before}")
            torch.set_num_threads(fixed["threads"])
        self.steps_made, self.public_steps = values["step"], values["public_steps"]
        take({name: tensors[f"model.{name}"] for name, _ in trainable(self.model)}, self.model)
        for name, part in self.kept.items():
            part.load_state_dict(unpack_state(values[name], tensors))
        return keys, ledger

    def save(self) -> None:
        """Save a checkpoint."""
        assert self.curator is not None
        tensors = {f"model.{name}": value for name, value in parameters(self.model).items()}
        values = {name: pack_state(name, part.state_dict(), tensors) for name, part in self.kept.items()}
        values |= {"step": self.steps_made, "public_steps": self.public_steps}
        values |= {"fixed": self._fixed, "sizes": self._sizes, "frozen": _frozen(self.model)}
        self.folder.save(self.curator.keys, self.curator.ledger, tensors, values)

    def statement(self, about: Circumstances) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged; of a finished run, the released one."""
        if self.folder.finished:
            return self.folder.statement()
        if self.curator is None:
            raise PrivacyError(f"{self.folder.path}: is closed; open it by PrivateTraining with the same arguments")
        ledger = self.curator.ledger
        if self.account is not None and ledger is not None and ledger.receipt is not None:
            about = replace(about, account=self.account.read().upto(ledger.receipt, str(self.folder.path)))
        charged = None if ledger is None else ledger.account()
        return build_statement(self.curator.plan, charged, about, TuningPart(kind="undeclared"))

    def finish(self, about: Circumstances) -> None:
        """Release the trained parameters with their statement, and remove the secret state."""
        weights = parameters(self.model)
        names, distances, norms = zip(*self.folder.distances(weights), strict=True)
        still = tuple(name for name, distance in zip(names, distances, strict=True) if not distance)
        self.movement = Movement(math.hypot(*distances), math.hypot(*norms), still)
        if still:
            warnings.warn(f"{self.movement.text()}; is the learning rate 0?", stacklevel=5)
        files = {MODEL: weights}
        if "average" in self.kept:
            files[AVERAGE] = parameters(self.kept["average"].module)
        self.folder.release(files, self.statement(about))
        self.close()

    def close(self) -> None:
        """Let another process go on with the run."""
        if self.curator is not None and self.curator.ledger is not None:
            self.curator.ledger.close()
        self.curator = None
        self.folder.close()


def _in_words(sizes: dict[str, int]) -> str:
    return " and ".join(f"{name} {size}" for name, size in sizes.items())


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name."""
    return {name: p.detach() for name, p in trainable(model)}


def gradients(model: nn.Module, answer: Answer, batch_size: float) -> list[Tensor]:
    """G of each trainable parameter: the answer divided by the expected batch size."""
    return [torch.from_numpy(answer.values[name] / batch_size).to(p.device, p.dtype) for name, p in trainable(model)]


@torch.no_grad()
def take(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Put weights into the trained parameters."""
    for name, p in trainable(model):
        p.copy_(weights[name])


def _frozen(model: nn.Module) -> list[list[Any]]:
    """What is not trained. Steps do not change it, so checkpoints hold no more of it than this."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return [[name, *fingerprint(value)] for name, value in everything(model).items() if name not in trained]
