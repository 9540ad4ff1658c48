"""Train any PyTorch module with differential privacy."""

from dpformer.training.private import PrivateTraining
from dpformer.training.watch import Movement

__all__ = ["Movement", "PrivateTraining"]
