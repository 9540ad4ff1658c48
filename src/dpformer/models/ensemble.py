"""A network and transition statistics, paid from one budget: their scores are added."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from torch import Tensor

from dpformer.models.network import Network, NetworkSpec
from dpformer.models.recommender import Recommender, Scores, Spec, build, first_of, parse_spec, register
from dpformer.models.transitions import TransitionScorer, TransitionsSpec

# Items outside the statistics' head have scores that only order them, far below all others: there the network decides.
FLOOR = -50.0


class EnsembleSpec(Spec):
    """The specs of both models, and the weight of the transitions."""

    kind: Literal["ensemble"] = "ensemble"
    network: Annotated[SerializeAsAny[NetworkSpec], BeforeValidator(parse_spec)]
    transitions: TransitionsSpec
    weight: float = Field(ge=0)

    @model_validator(mode="after")
    def _same_items(self) -> EnsembleSpec:
        if not self.items == self.network.items == self.transitions.items:
            raise ValueError("the models of an ensemble must score the same items")
        return self

    @property
    def name(self) -> str:
        return f"{self.network.name} and {self.transitions.name}"


@register("ensemble", EnsembleSpec)
class Ensemble(Recommender):
    """`score = network + weight * transitions`, of all items; an empty history is scored by the transitions alone.

    The two see different things: the statistics have a number for each pair of frequent items, the network has few numbers and
    shares them among all. Their noise is independent, and adding them averages it.
    """

    spec: EnsembleSpec

    def __init__(
        self, spec: EnsembleSpec, network: Network | None = None, transitions: TransitionScorer | None = None
    ) -> None:
        super().__init__(spec)
        self.network = cast(Network, build(spec.network)) if network is None else network
        self.transitions = TransitionScorer(spec.transitions) if transitions is None else transitions

    @classmethod
    def of(cls, network: Network, transitions: TransitionScorer, weight: float) -> Ensemble:
        """Join two models; no tensor is copied."""
        spec = EnsembleSpec(items=network.spec.items, network=network.spec, transitions=transitions.spec, weight=weight)
        return cls(spec, network, transitions)

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        transitions = self.transitions(history, lengths)
        both = self.network(history, lengths) + self.spec.weight * transitions.clamp_min(FLOOR)
        return torch.where((lengths == 0)[:, None], transitions, both)

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """What the network or the transitions score by the history, and the first of the other items.

        Those have the score bias + weight max(least of the head + tail, FLOOR): a maximum of two terms, each of which
        orders them in the same way for all histories. The best of the maximum are among the best of both. With features every
        item may be among the best.
        """
        if self.transitions.targets is not None:
            return super().candidates(best, allowed)
        tail, bias = self.transitions.tail, self.network.output_bias
        inside = self.network.vocabulary() | (tail == 0)
        orders = (tail, bias, bias + self.spec.weight * tail)
        rest = [first_of(order, allowed & ~inside, best) for order in orders]
        return torch.cat([(allowed & inside).nonzero()[:, 0], *rest]).unique()

    def scorer(self, items: Tensor) -> Scores:
        parts = self.network.scorer(items), self.transitions.scorer(items)

        def scores(history: Tensor, lengths: Tensor) -> Tensor:
            network, transitions = (part(history, lengths) for part in parts)
            network.add_(transitions.clamp_min(FLOOR), alpha=self.spec.weight)
            empty = lengths == 0
            network[empty] = transitions[empty]
            return network

        return scores

    def similar(self, item: int) -> Tensor | None:
        own = self.network.similar(item)
        return self.transitions.similar(item) if own is None else own

    def popularity(self) -> Tensor | None:
        own = self.network.popularity()
        return self.transitions.popularity() if own is None else own

    def trained_network(self) -> Network:
        return self.network

    def check(self) -> None:
        self.network.check()
        self.transitions.check()
