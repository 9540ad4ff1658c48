"""From any log to sequences, and from sequences to batches. See docs/data.md."""

from dpformer.data.batches import MicroBatch, collate, cut, micro_batches
from dpformer.data.demo import demo_frame
from dpformer.data.named import NAMED, prepare_named
from dpformer.data.prepare import prepare
from dpformer.data.sequences import Dataset, Sequences
from dpformer.data.split import HeldOut, held_out
from dpformer.data.store import load, save
from dpformer.data.summary import item_counts, statistics

__all__ = [
    "NAMED",
    "Dataset",
    "HeldOut",
    "MicroBatch",
    "Sequences",
    "collate",
    "cut",
    "demo_frame",
    "held_out",
    "item_counts",
    "load",
    "micro_batches",
    "prepare",
    "prepare_named",
    "save",
    "statistics",
]
