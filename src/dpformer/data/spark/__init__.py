"""Prepare logs larger than one machine with Spark. See docs/data.md."""

from dpformer.data.spark.engine import prepare_spark

__all__ = ["prepare_spark"]
