"""Transformers on people's sequences with user-level differential privacy."""

__version__ = "0.1.0.dev0"
