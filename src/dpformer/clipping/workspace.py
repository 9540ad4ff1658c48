"""Memory that is made once and used again: fresh memory of some MB costs more than the arithmetic on it."""

import torch
from torch import Tensor


class Workspace:
    """Large tensors by name."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self.held_by: object = None

    def take(self, name: str, rows: int, cols: int, like: Tensor) -> Tensor:
        """Uninitialised `[rows, cols]`, valid until the same name is taken again."""
        view = self._views.get(name)
        if view is not None and view.shape == (rows, cols) and view.dtype == like.dtype and view.device == like.device:
            return view
        memory = self._memory.get(name)
        if memory is None or memory.numel() < rows * cols or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory[name] = torch.empty(rows * cols, dtype=like.dtype, device=like.device)
        view = self._views[name] = memory[: rows * cols].view(rows, cols)
        return view
