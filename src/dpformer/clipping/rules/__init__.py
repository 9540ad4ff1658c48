"""What happens to a parameter in each torch function with a rule. Importing this package fills `registry.RULES`."""

from dpformer.clipping.rules import apart, broadcast, layers, linear, recurrent, rows

__all__ = ["apart", "broadcast", "layers", "linear", "recurrent", "rows"]
