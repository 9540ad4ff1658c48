"""Phantom Clipping: exact per-sample gradient clipping for any shared parameter."""

from dpformer.clipping.algebra import Dense, Outer, Sparse
from dpformer.clipping.clip import Clip
from dpformer.clipping.phantom import PhantomClipping
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import register_rule
from dpformer.clipping.tied_head import TiedCrossEntropy

__all__ = ["Clip", "Dense", "Outer", "PhantomClipping", "Recorder", "Sparse", "TiedCrossEntropy", "register_rule"]
