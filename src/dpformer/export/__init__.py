"""A released model in other runtimes: ONNX and torch.export. The model is its own graph."""

from dpformer.export.write import export_run, graph_of

__all__ = ["export_run", "graph_of"]
