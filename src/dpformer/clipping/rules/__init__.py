"""What happens to a parameter in each torch function with a rule: one small module per kind of function.

Importing this package fills the registry `dpformer.clipping.recorder.RULES`.
"""

from dpformer.clipping.rules import apart, elementwise, embedding, head, layers, linear, matmul, moving, norm, recurrent

__all__ = ["apart", "elementwise", "embedding", "head", "layers", "linear", "matmul", "moving", "norm", "recurrent"]
