"""Counts and times for Prometheus. Sums over requests; nothing of a history but how many there were."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from dpformer.artifact import Artifact

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_HISTORIES = (1, 2, 4, 8, 16, 32, 64)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """The metrics of one server, in a registry of its own. They go on counting when the model is exchanged."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter("dpformer_requests", "Requests answered.", ("method", "path", "status"), registry=own)
        self._seconds = Histogram(
            "dpformer_request_seconds", "Time to answer.", ("path",), buckets=_SECONDS, registry=own
        )
        self._batch = Histogram(
            "dpformer_batch_histories", "Histories in one forward pass.", buckets=_HISTORIES, registry=own
        )
        self._waiting = Gauge("dpformer_waiting", "Histories that wait for the model.", registry=own)
        self._model = Gauge("dpformer_model", "What is served.", ("model", "epsilon", "delta", "items"), registry=own)

    def serve(self, artifact: Artifact, waiting: Callable[[], int]) -> None:
        """Describe the model that is served from now on."""
        statement = artifact.statement
        self._waiting.set_function(waiting)
        self._model.clear()
        self._model.labels(
            artifact.model.spec.name, str(statement.epsilon), f"{statement.delta:g}", str(len(artifact.catalogue))
        ).set(1)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request; path is that of a route, never what a client made up."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def batch(self, size: int) -> None:
        self._batch.observe(size)

    def text(self) -> bytes:
        return generate_latest(self._registry)
