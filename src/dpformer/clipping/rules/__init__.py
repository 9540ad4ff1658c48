"""What happens to a parameter in each torch function with a rule: one small module per kind of function.

Importing this package fills the registry `dpformer.clipping.recorder.RULES`.
"""

from dpformer.clipping.rules import elementwise, embedding, head, linear, matmul, moving, norm

__all__ = ["elementwise", "embedding", "head", "linear", "matmul", "moving", "norm"]
