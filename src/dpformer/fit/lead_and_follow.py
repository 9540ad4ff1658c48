"""How several processes begin and end one run: rank 0 has the run, the others follow.

    rank 0                                    the others (`follow`)
    opens or reopens the run folder
    `compare_data`: where the data is      -> load theirs, and send its hash: it must be rank 0's
    asks for histogram and transitions
    `lead`: recipe, plan, network          -> make the same query
    the sums of all steps                  -> take part; see `clipped_sum`
    saves, or releases the model           -> end with it

What the others get has been released or is about to be: weights carry noise. The Curator stays with rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load as from_safetensors

from dpformer import __version__
from dpformer.artifact.layout import PRIVATE
from dpformer.data import Dataset, Sequences, load
from dpformer.errors import DPFormerError, RankError
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.fit.folder import finish_written
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.recipe import Recipe
from dpformer.models import Network, build, parse_spec
from dpformer.privacy.plan import plan_from_json, plan_to_json
from dpformer.training.folder import pack
from dpformer.training.ranks import LeaderError, Ranks


def compare_data(ranks: Ranks, dataset: Dataset, path: Path) -> None:
    """On rank 0: let the others load the data, and check that it is the same, before anything is spent."""
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


def lead(trainer: Trainer, ranks: Ranks, recipe: Recipe, items: list[Any] | None) -> None:
    """On rank 0: send the others all that the sums depend on, and share the sums out. items: of a private catalogue."""
    if ranks.size == 1:
        trainer.move(ranks.device)
        return
    about = {"plan": plan_to_json(trainer.plan), "recipe": recipe.settings(), "threads": torch.get_num_threads()}
    ranks.broadcast({**about, "items": items, "network": trainer.model.spec.model_dump(mode="json")})
    ranks.broadcast_bytes(pack(trainer.model.state_dict()))
    trainer.move(ranks.device)
    trainer.query.ranks = ranks


class Follower:
    """What rank 1, 2, ... have of a run: people's data, and a network that gets its weights for each sum. It writes nothing."""

    def __init__(self, query: GradientSum, people: Sequences) -> None:
        self.query, self.people = query, people

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Take part in all sums of rank 0. True when the model is released; False if the run was stopped on request."""
        while "grid" in (order := self.query.ranks.broadcast()):
            self.query.take_part(self.people, order, should_stop())
        return bool(order["released"])


def follow(ranks: Ranks, data: Path | None = None) -> Follower | None:
    """On all ranks but 0, while rank 0 starts or resumes a run. None if rank 0 needs no other, or stops before the steps."""
    data_path = ranks.broadcast()
    if data_path is None:
        return None
    try:
        dataset = load(data or Path(data_path))
    except DPFormerError as error:
        ranks.gather({"error": error.typed})
        ranks.broadcast()
        raise AssertionError("rank 0 goes on without the data of this rank") from error
    ranks.gather(_contents(dataset))
    about = ranks.broadcast()
    if "recipe" not in about:
        return None
    recipe, plan = Recipe.model_validate(about["recipe"]), plan_from_json(about["plan"])
    torch.set_num_threads(about["threads"])
    people = dataset.train(recipe.hold_out)
    if about["items"] is not None:
        people = people.renumbered(dataset.numbers_in(dataset.with_items(about["items"]).catalogue))
    network = cast(Network, build(parse_spec(about["network"])))
    network.load_state_dict(from_safetensors(ranks.broadcast_bytes()))
    trainer = Trainer(network, plan, Optimisation.of(recipe))
    trainer.move(ranks.device)
    trainer.query.ranks = ranks
    return Follower(trainer.query, people)


def finished(folder: Path, ranks: Ranks) -> bool:
    """Is the model released, but for its last files? Then they are put in place, and nothing is left to do, for any process."""
    if done := finish_written(folder):
        ranks.release_others()
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
    """What must be the same on all ranks. Of another version the clipping may be other than it says."""
    digest = hashlib.sha256()
    for array in (dataset.sequences.items, dataset.sequences.offsets):
        digest.update(f"{array.shape} {array.dtype.str}".encode() + array.tobytes())
    versions = f"dpformer {__version__}, torch {torch.__version__}"
    return {"sequences": digest.hexdigest(), "items": str(len(dataset.catalogue)), "versions": versions}
