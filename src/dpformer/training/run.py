"""A run of `PrivateTraining`: its folder, its Curator, its checkpoints, and its end. `fit.run` has those of `dpformer fit`.

training.json       the settings; a run goes on with the same ones only     privacy.json    the privacy statement
ledger.jsonl, .head what was charged, before it was seen                    run.lock        keeps a second process out
model.safetensors   the trained parameters (average.safetensors: their average, if one was kept)
private/            state of an unfinished run; owner only, removed at the end
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpformer import __version__
from dpformer.artifact import complete, is_written, read_statement
from dpformer.artifact.layout import LOCK, MODEL, PRIVACY, RELEASE, TRAINING
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.files import read_json, to_json, write_file, write_folder
from dpformer.privacy import Curator, Keys, PrivacyPlan, PrivacyStatement, read_ledger
from dpformer.privacy.account import PeopleAccount
from dpformer.privacy.build import Circumstances
from dpformer.privacy.plan import plan_to_json
from dpformer.privacy.statement import TuningPart
from dpformer.training.clipped_sum import trainable
from dpformer.training.folder import RunFolder, pack, state_privacy
from dpformer.training.module_sum import ModuleSum
from dpformer.training.people import People
from dpformer.training.ranks import SINGLE, Ranks
from dpformer.training.state import pack_state, unpack_state
from dpformer.training.watch import Movement, everything, fingerprint

MakeCurator = Callable[..., Curator[People]]
FORMAT, START, AVERAGE = "dpformer-training", "start.safetensors", "average.safetensors"


class TrainingRun:
    """Opens a new run or one that goes on. kept: beside the model, what checkpoints keep (optimizer, scheduler, average).

    settings: what must be the same when the run goes on, ready for JSON. sizes: of the data. They are not released: one person
    more or less changes them. account: of the people, charged before a new run asks anything. curator: None when the run is
    finished or closed.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        model: nn.Module,
        kept: dict[str, Any],
        micro_batch: int,
        sizes: dict[str, int],
        account: PeopleAccount | None,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.path, self.model, self.kept, self.account, self.ranks = path, model, kept, account, ranks
        self.steps_made, self.public_steps = 0, 0
        self.curator: Curator[People] | None = None
        self.movement: Movement | None = None
        self._settings, self._sizes = {"format": FORMAT, "version": 1, **settings}, sizes
        self._fixed = {"micro_batch": micro_batch, "threads": torch.get_num_threads()}
        self._open_folder()

    def _open_folder(self) -> None:
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        self._folder = RunFolder(path)
        with self._folder.closed_on_error():
            if self._begun:
                self._compare()
            elif any(file.name != LOCK for file in path.iterdir()):
                raise DPFormerError(f"{path}: holds other files; choose a new folder with run=")
            if is_written(path):
                complete(path)

    @property
    def _begun(self) -> bool:
        return (self.path / TRAINING).exists()

    @property
    def finished(self) -> bool:
        """Is the model released?"""
        return (self.path / MODEL).exists() and not self._folder.private.exists()

    def _compare(self) -> None:
        stored = read_json(self.path / TRAINING)
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise DPFormerError(
                f"{self.path / TRAINING}: was not written by dpformer, or is damaged; choose another run="
            )
        for name in {**stored, **self._settings}:
            before, now = stored.get(name), self._settings.get(name)
            if before != now and name != "dpformer":
                raise PrivacyError(
                    f"{self.path}: this run began with {name} {_short(before)}, not {_short(now)}; give it as it was, or begin "
                    "another run in a folder of its own, which spends a budget of its own"
                )

    def open(
        self, people: People, plan: Callable[[], PrivacyPlan], keys: Callable[[], Keys], make_curator: MakeCurator
    ) -> PrivacyPlan:
        """Begin, or go on, or take the weights of a finished run. plan, keys: made for a new run. Returns the plan."""
        with self._folder.closed_on_error():
            self._compare_ranks()
            planned = self._opened(people, plan, keys, make_curator)
            self._lead(planned)
        return planned

    def _opened(
        self, people: People, plan: Callable[[], PrivacyPlan], keys: Callable[[], Keys], make_curator: MakeCurator
    ) -> PrivacyPlan:
        if self.finished:
            take(load_file(self.path / MODEL), self.model)
            if "average" in self.kept:
                take(load_file(self.path / AVERAGE), self.kept["average"].module)
            stated = read_statement(self.path)
            self.steps_made = stated.steps.charged if stated.steps is not None else 0
            return read_ledger(self.path).plan if stated.private else plan()
        if self._begun:
            own, ledger = self._restore(), self._folder.ledger
            self.curator = make_curator(people, plan() if ledger is None else ledger.plan, ledger, own)
        else:
            new, settings = plan(), to_json({**self._settings, "dpformer": __version__})
            self._folder.begin(new, self.account, (TRAINING, settings))
            write_file(self._folder.private / START, pack(parameters(self.model)), 0o600)
            self.curator = make_curator(people, new, self._folder.ledger, keys())
            self.save()
        return self.curator.plan

    def _contents(self) -> dict[str, Any]:
        """What must be the same on all ranks. Of another version the clipping may be other than it says."""
        versions = f"dpformer {__version__}, torch {torch.__version__}"
        about: dict[str, Any] = {"settings": self._settings, "sizes of the data": self._sizes, "versions": versions}
        about |= {"frozen parameters": _frozen(self.model), "micro_batch": self._fixed["micro_batch"]}
        return dict(json.loads(json.dumps(about)))

    def _compare_ranks(self) -> None:
        """On rank 0, before anything is charged: refuse others that were started with something else."""
        own = self._contents() if self.ranks.size > 1 else {}
        for rank, theirs in enumerate(self.ranks.gather(own)):
            if different := [name for name in own if theirs[name] != own[name]]:
                raise PrivacyError(f"rank {rank} has other {different[0]} than rank 0; start the same program on all")

    def _lead(self, plan: PrivacyPlan) -> None:
        """On rank 0: send the others all that their steps depend on; the Curator stays here."""
        if self.ranks.size > 1:
            tensors, values = self.state()
            stated = read_statement(self.path).to_json() if self.finished else None
            about = {"plan": plan_to_json(plan), "threads": torch.get_num_threads(), "statement": stated}
            self.ranks.broadcast({**about, "state": values})
            self.ranks.broadcast_bytes(pack(tensors))

    @property
    def is_open(self) -> bool:
        """Are there steps to make?"""
        return self.curator is not None

    def start(self, query: ModuleSum) -> tuple[list[np.ndarray], bytes]:
        """Begin the next sum: the places of the people of this process's micro-batches, and the key of the step."""
        assert self.curator is not None
        sample, grid = self.curator.upcoming(query)
        return query.start(sample, grid), sample.key

    def gradients(self, query: ModuleSum, batch_size: float) -> list[Tensor]:
        """G of each trainable parameter: the answer divided by the expected batch size; the same on all processes."""
        assert self.curator is not None
        answer = self.curator.ask(query)
        made = [
            torch.from_numpy(answer.values[name] / batch_size).to(p.device, p.dtype)
            for name, p in trainable(self.model)
        ]
        self.ranks.share_(made)
        return made

    def _restore(self) -> Keys:
        tensors, values = self._folder.load()
        keys = self._folder.reopen_ledger(values)
        if values["sizes"] != self._sizes:
            raise PrivacyError(
                f"{self.path}: this run began with {_in_words(values['sizes'])}, not {_in_words(self._sizes)}; give the "
                "same data, or begin another run in a folder of its own, which spends a budget of its own"
            )
        if values["frozen"] != _frozen(self.model):
            raise PrivacyError(f"{self.path}: frozen parameters or buffers are not those that the run began with")
        ledger = self._folder.ledger
        if ledger is not None and ledger.position().entries > keys.place:
            # These steps were charged; they are made again, and must come out the same.
            fixed, mine = values["fixed"], self._fixed["micro_batch"]
            if fixed["micro_batch"] != mine:
                before = f"micro_batch {fixed['micro_batch']} as before, not {mine}"
                raise PrivacyError(f"{self.path}: charged steps are made again, which needs {before}")
            torch.set_num_threads(fixed["threads"])
        self.put(tensors, values)
        return keys

    def put(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a state."""
        self.steps_made, self.public_steps = values["step"], values["public_steps"]
        take({name: tensors[f"model.{name}"] for name, _ in trainable(self.model)}, self.model)
        for name, part in self.kept.items():
            part.load_state_dict(unpack_state(name, values[name], tensors))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the coming steps depend on, but for the Curator: tensors, and JSON-ready values."""
        tensors = {f"model.{name}": value for name, value in parameters(self.model).items()}
        values = {name: pack_state(name, part.state_dict(), tensors) for name, part in self.kept.items()}
        return tensors, values | {"step": self.steps_made, "public_steps": self.public_steps}

    def save(self) -> None:
        """Save a checkpoint."""
        assert self.curator is not None
        tensors, values = self.state()
        values |= {"fixed": self._fixed, "sizes": self._sizes, "frozen": _frozen(self.model)}
        self._folder.save(self.curator.keys, tensors, values)

    def statement(self, about: Circumstances) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged; of a finished run, the released one."""
        if self.finished:
            return read_statement(self.path)
        if self.curator is None:
            raise PrivacyError(f"{self.path}: is closed; open it by PrivateTraining with the same arguments")
        return state_privacy(self.curator, about, TuningPart(kind="undeclared"), self._folder.spending(self.account))

    def finish(self, about: Circumstances) -> None:
        """Release the trained parameters with their statement, and remove the secret state; see `artifact.write`."""
        self.movement = Movement.since(self._folder.private / START, parameters(self.model))
        if self.movement.still:
            warnings.warn(f"{self.movement.text()}; is the learning rate 0?", stacklevel=5)
        files = {PRIVACY: self.statement(about).to_json().encode(), MODEL: pack(parameters(self.model))}
        if "average" in self.kept:
            files[AVERAGE] = pack(parameters(self.kept["average"].module))
        write_folder(self._folder.private / RELEASE, files.items(), mode=0o644)
        complete(self.path)
        self.ranks.broadcast({"statement": read_statement(self.path).to_json(), "movement": asdict(self.movement)})
        self.close()

    def close(self) -> None:
        """Let another process go on with the run."""
        self.curator = None
        self._folder.close()


def _in_words(sizes: dict[str, int]) -> str:
    return " and ".join(f"{name} {size}" for name, size in sizes.items())


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name."""
    return {name: p.detach() for name, p in trainable(model)}


@torch.no_grad()
def take(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Put weights into the trained parameters."""
    for name, p in trainable(model):
        p.copy_(weights[name])


def _frozen(model: nn.Module) -> list[list[Any]]:
    """What is not trained. Steps do not change it, so checkpoints hold no more of it than this."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return [[name, *fingerprint(value)] for name, value in everything(model).items() if name not in trained]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]} ..."
