"""Logs that do not fit one machine: the same sequences by Spark. See docs/scaling.md."""

from dpformer.data.spark.engine import prepare_spark

__all__ = ["prepare_spark"]
