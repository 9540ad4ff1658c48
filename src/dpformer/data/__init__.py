"""Turn any log into sequences, and sequences into batches. See docs/data.md."""

from dpformer.data.batches import MicroBatch, collate, micro_batches
from dpformer.data.demo import demo_frame
from dpformer.data.named import prepare_named
from dpformer.data.options import Options, like
from dpformer.data.prepare import prepare
from dpformer.data.sequences import Dataset, Sequences
from dpformer.data.split import HeldOut, held_out
from dpformer.data.store import load, save
from dpformer.data.summary import statistics

__all__ = ["Dataset", "HeldOut", "MicroBatch", "Options", "Sequences", "collate", "demo_frame", "held_out", "like"]
__all__ += ["load", "micro_batches", "prepare", "prepare_named", "save", "statistics"]
