"""What every model is: item histories in, scores of all items out; and the registry that builds a model from its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpformer.models.network import Network


Scores = Callable[[Tensor, Tensor], Tensor]


class Spec(BaseModel):
    """All that is needed to build a model, but for its tensors; saved as `model.json`. A subclass per model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    items: int = Field(ge=1)

    @property
    def window(self) -> int | None:
        """How many of a history's last items the model reads; None for all of them."""
        return None

    @property
    def name(self) -> str:
        return self.kind


class Recommender(nn.Module):
    """Scores all items as the next one. Its `state_dict` is its whole state, and `torch.export` gives its graph."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def item_count(self) -> int:
        return self.spec.items

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        """Score all items.

        Args:
            history: int64 `[B, L]`, item numbers 1..items, oldest first, 0 after the end.
            lengths: int64 `[B]`, from 0 for an empty history.

        Returns:
            float32 `[B, items + 1]`; entry 0, the padding, is -inf.
        """
        raise NotImplementedError

    @torch.no_grad()
    def scores(self, history: Tensor, lengths: Tensor) -> Tensor:
        """`forward` without gradients: a new tensor, which the caller may overwrite."""
        scores: Tensor = self(history, lengths)
        return scores

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """Numbers of items among which, for every history, are the `best` best of the items `allowed`, bool `[items + 1]`.

        Where scores tie, they are some of the best. Models that score few items by the history return few.
        """
        return allowed.nonzero()[:, 0]

    def scorer(self, items: Tensor) -> Scores:
        """A function from history and lengths, as in `forward`, to the scores of these items alone, `[B, len(items)]`."""
        return lambda history, lengths: self(history, lengths)[:, items]

    def similar(self, item: int) -> Tensor | None:
        """How alike each item is to this one, `[items + 1]`, by released values; -inf for items of which nothing is known.

        None if nothing about this item was released.
        """
        return None

    def popularity(self) -> Tensor | None:
        """Released frequencies of items up to a factor, `[items + 1]`; 0 for padding, and where only an order was released.

        None if nothing was released: then empty histories are answered in the order of the catalogue.
        """
        return None

    def trained_network(self) -> Network | None:
        """The network in it, or None if it has none."""
        return None

    def check(self) -> None:
        """Raise a ValueError if a tensor holds values that this model cannot have; shapes are right already."""


def first_of(order: Tensor, allowed: Tensor, best: int) -> Tensor:
    """Numbers of the `best` allowed items with the largest values, `[items + 1]`."""
    inside = allowed.nonzero()[:, 0]
    return inside[order[inside].topk(min(best, len(inside))).indices]


Model = TypeVar("Model", bound=Recommender)
_MODELS: dict[str, tuple[type[Spec], Callable[[Any], Recommender]]] = {}


def register(kind: str, spec: type[Spec]) -> Callable[[type[Model]], type[Model]]:
    """Let `build` and `parse_spec` know a class of models."""

    def add(model: type[Model]) -> type[Model]:
        _MODELS[kind] = (spec, model)
        return model

    return add


def kinds(spec: type[Spec]) -> list[str]:
    """The kinds of models whose spec is of this class."""
    return [kind for kind, (own, _) in _MODELS.items() if issubclass(own, spec)]


def build(spec: Spec) -> Recommender:
    """Build a new model."""
    return _MODELS[spec.kind][1](spec)


def restore(spec: Spec, tensors: Mapping[str, Tensor]) -> Recommender:
    """Build the model that has this state; a ValueError if the tensors are not such a state. No memory but theirs is taken."""
    with torch.device("meta"):  # shapes without memory
        model = build(spec)
    expected = model.state_dict()
    if tensors.keys() != expected.keys():
        raise ValueError(f"tensors are missing or too many: {', '.join(sorted(tensors.keys() ^ expected.keys())[:5])}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            asked = f"{expected[name].dtype} {list(expected[name].shape)}"
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, and the spec asks for {asked}")
    model.load_state_dict(dict(tensors), assign=True)
    model.check()
    return model.eval()


def parse_spec(value: Any) -> Spec:
    """The spec that JSON was made of; a ValueError if there is no such model."""
    if isinstance(value, Spec):
        return value
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ValueError(f"there is no model of kind {str(kind)[:40]!r}; there are: {', '.join(_MODELS)}")
    return _MODELS[kind][0].model_validate(value)


def last_kept(values: Tensor, keep: Tensor, width: int, fill: int) -> tuple[Tensor, Tensor]:
    """The last `width` of the values `[B, L]` that are kept, newest first, `[B, width]`, then `fill`; and how many, `[B]`.

    By a scatter and not by a sort, so that a graph of it needs no shapes but B and L.

    >>> values, keep = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[True, True, False, True]])
    >>> last_kept(values, keep, 2, 0), last_kept(values, keep, 4, 0)
    ((tensor([[8, 6]]), tensor([2])), (tensor([[8, 6, 5, 0]]), tensor([3])))
    """
    kept = keep.to(torch.int64)
    total = kept.sum(1)
    k = total[:, None] - kept.cumsum(1) + kept  # a kept value is the k-th to last one
    # What is left out goes to one more column, which is cut off.
    column = torch.where(keep & (k <= width), k - 1, width)
    packed = torch.full((values.shape[0], width + 1), fill, device=values.device)
    return packed.scatter(1, column, values)[:, :width], total.clamp_max(width)
