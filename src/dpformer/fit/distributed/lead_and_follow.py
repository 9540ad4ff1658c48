"""How several processes begin and end one run: rank 0 has the run, the others follow.

    rank 0                                    the others (`follow`)
    opens or reopens the run folder
    `compare_data`: where the data is      -> load theirs, and send its hash: it must be rank 0's
    releases histogram and prior
    `lead`: recipe, plan, weights          -> build the same model from them
    a step, then: does anybody wish to stop?  the same
    saves, or releases the model           -> end with it

What the others get has been released or is about to be: weights and the optimiser's state carry noise. The Curator
stays with rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

from dpformer import __version__
from dpformer.artifact.layout import PRIVATE
from dpformer.data import Dataset, Sequences, load
from dpformer.errors import DPFormerError, RankError
from dpformer.fit.distributed.parallel import digest
from dpformer.fit.distributed.ranks import LeaderError, Ranks
from dpformer.fit.distributed.restart import began_in, finished_in
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.fit.folder import finish_written
from dpformer.fit.recipe import Recipe
from dpformer.models.network import Network
from dpformer.models.recommender import build, parse_spec
from dpformer.privacy.ledger import plan_from_json, plan_to_json


def release_followers(ranks: Ranks) -> Ranks:
    """Tell the others that rank 0 needs none of them, and be one process from now on."""
    ranks.broadcast(None)
    return Ranks(job=ranks.job, restarts=ranks.restarts, meeting=ranks.meeting)


def compare_data(ranks: Ranks, dataset: Dataset, path: Path) -> None:
    """On rank 0: let the others load the data, and see that it is the same, before anything is spent."""
    if ranks.size == 1:
        return
    ranks.broadcast(str(path.resolve()))
    own = _contents(dataset)
    for rank, theirs in enumerate(ranks.gather(own)):
        if theirs.get("error"):
            raise DPFormerError(
                f"rank {rank}: {theirs['error']}; every machine needs the data, at the same path or by --data"
            )
        if theirs["versions"] != own["versions"]:
            raise DPFormerError(
                f"rank {rank} has {theirs['versions']}, and rank 0 has {own['versions']}; install the same on all machines"
            )
        if theirs != own:
            raise DPFormerError(f"rank {rank}: {path} is not the data that rank 0 has; copy it to all machines")


def lead(trainer: Trainer, recipe: Recipe, items: list[Any] | None) -> None:
    """On rank 0: tell the others all that the coming steps depend on, but for the Curator. items: of a private catalogue."""
    if trainer.ranks.size == 1:
        return
    tensors, values = trainer.state()
    about = {"plan": plan_to_json(trainer.plan), "recipe": recipe.settings(), "threads": torch.get_num_threads()}
    about |= {"step": values["step"], "items": items, "network": trainer.model.spec.model_dump(mode="json")}
    trainer.ranks.broadcast(about)
    trainer.ranks.broadcast_bytes(to_safetensors({name: value.contiguous().cpu() for name, value in tensors.items()}))
    trainer.move(trainer.ranks.device)


class Follower:
    """What rank 1, 2, ... have of a run: a trainer that makes the same steps. It writes nothing."""

    def __init__(self, trainer: Trainer, people: Sequences) -> None:
        self.trainer, self._people = trainer, people

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Make the steps that are left, in step with rank 0. True when the model is released; False if stopped on request."""
        ranks = self.trainer.ranks
        while self.trainer.step < self.trainer.plan.steps:
            self.trainer.follow_step(self._people)
            if ranks.agree(should_stop()):
                break
        return bool(ranks.broadcast())


def follow(ranks: Ranks, data: Path | None = None) -> Follower | None:
    """On all ranks but 0, while rank 0 starts or resumes a run. None if rank 0 needs no other, or stops before the steps."""
    data_path = ranks.broadcast()
    if data_path is None:
        return None
    try:
        dataset = load(data or Path(data_path))
    except DPFormerError as error:
        ranks.gather({"error": str(error)})
        ranks.broadcast()
        raise AssertionError("rank 0 goes on without the data of this rank") from error
    ranks.gather(_contents(dataset))
    about = ranks.broadcast()
    if about is None:
        return None
    recipe, plan = Recipe.model_validate(about["recipe"]), plan_from_json(about["plan"])
    torch.set_num_threads(about["threads"])
    people = dataset.train(recipe.hold_out)
    if about["items"] is not None:
        chosen = dataset.with_items(about["items"])
        people = people.renumbered(dataset.numbers_in(chosen.catalogue))
        dataset = chosen
    network = build(parse_spec(about["network"]))
    assert isinstance(network, Network)
    trainer = Trainer(network, plan, Optimisation.of(recipe), ranks, about_run(recipe, len(dataset.catalogue)))
    trainer.restore(from_safetensors(ranks.broadcast_bytes()), {"step": about["step"], "nonfinite": 0})
    trainer.move(ranks.device)
    return Follower(trainer, people)


def about_run(recipe: Recipe, items: int) -> str:
    """What must be the same on all ranks beside the data, which `compare_data` compares once."""
    return f"{recipe.model_dump_json()} {items}"


def finished(folder: Path, ranks: Ranks, resuming: bool = True) -> bool:
    """Is the model released, but for its last files? Then they are put in place, and nothing is left to do, for any process.

    resuming: False for a command that starts a run; only a restart of it may end what it started.
    """
    with ranks.leading():
        own = resuming or (ranks.restarts > 0 and began_in(folder, ranks.job))
        done = own and (finish_written(folder) or finished_in(folder, ranks))
        if done:
            release_followers(ranks)
        return done


@contextmanager
def explained_rank_error(folder: Path) -> Iterator[None]:
    """On rank 0: say what to do when another process has ended, hangs, or is out of step."""
    try:
        yield
    except LeaderError:
        raise
    except RankError as error:
        if not (folder / PRIVATE).is_dir():
            raise RankError(f"{error}. Nothing was begun or spent: start it again") from None
        raise RankError(
            f"{error}. The run has ended; the ledger says at least what was spent, and steps since the last checkpoint are made "
            f"again at no cost. Go on with: dpformer resume {folder}, or under torchrun with any number of processes"
        ) from None


def _contents(dataset: Dataset) -> dict[str, str]:
    sequences = dataset.sequences
    # Of another version the clipping may be other than it says.
    versions = f"dpformer {__version__}, torch {torch.__version__}"
    items = str(len(dataset.catalogue))
    return {"sequences": digest(sequences.items, sequences.offsets), "items": items, "versions": versions}
