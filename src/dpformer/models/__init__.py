"""Sequence models. They know nothing of clipping or budgets: the recorder sees the functions that they call."""
