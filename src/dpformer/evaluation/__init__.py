"""Full ranking, metrics, slices by popularity, and the protocol that stands beside every figure. See docs/training.md."""

from dpformer.data import HeldOut, held_out
from dpformer.evaluation.evaluate import Evaluation, Protocol, Slice, evaluate
from dpformer.evaluation.metrics import HEADLINE, Figure, difference, metrics
from dpformer.evaluation.ranking import Ranks, rank
from dpformer.models.top import Scorer

__all__ = ["HEADLINE", "Evaluation", "Figure", "HeldOut", "Protocol", "Ranks", "Scorer", "Slice", "difference"]
__all__ += ["evaluate", "held_out", "metrics", "rank"]
