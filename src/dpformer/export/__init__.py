"""A released model in other runtimes: ONNX and torch.export. Top-k stays outside, with the item table beside the graph."""

from dpformer.export.graphs import Graph, graph_of
from dpformer.export.write import export_run

__all__ = ["Graph", "export_run", "graph_of"]
