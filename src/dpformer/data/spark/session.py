"""The Spark that does the work: the one that is there, else a local one."""

import os
import sys
import warnings
from typing import TYPE_CHECKING

from dpformer.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session() -> "SparkSession":
    """The session of this process or of `spark-submit`; otherwise a local one on all cores.

    Workers run the Python of this process unless PYSPARK_PYTHON says otherwise, and polars in them takes one thread: Spark
    already runs one worker a core.
    """
    try:
        import pyarrow  # noqa: F401
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise DataError(
            f"--engine spark needs {error.name}, which is not installed; pip install 'dpformer[spark]'"
        ) from None
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings: dict[str, bool | float | int | str | None] = {
        "spark.app.name": "dpformer prepare",
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.POLARS_MAX_THREADS": "1",
        "spark.log.level": "ERROR",
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # pyspark on a pandas newer than it knows, which we do not use
            return SparkSession.builder.config(map=settings).getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        raise DataError(f"Spark does not start ({error}); it needs Java 17 or later: check JAVA_HOME") from None
