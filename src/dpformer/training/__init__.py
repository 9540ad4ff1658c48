"""Train any PyTorch module with differential privacy."""

from dpformer.training.private import PrivateTraining
from dpformer.training.run import Movement

__all__ = ["Movement", "PrivateTraining"]
