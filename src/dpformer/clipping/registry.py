"""The registry of rules: for each torch function the rule that replaces it while a recorder is active, and its name in errors."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
# Rules that can take a view whose first dimension may be the samples, and so leave it a view.
LAZY: set[Rule | None] = set()
# Rules that make a view of a parameter where the batch is not there yet.
MAKES_VIEWS: set[Rule | None] = set()


def register_rule(*functions: Any, lazy: bool = False, views: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: `rule(recorder, function, *args, **kwargs)` takes the place of `functions` while a recorder is active.

    The rule computes the output from `recorder.value(...)` of its arguments, never from a parameter itself. It returns
    `recorder.record(function, output, views, derive, saved=[input])`. `derive(gradient, samples, input)` turns the gradient at
    the output, and the tensors saved, into one form (`Outer`, `Sparse` or `Dense`) for each view. Samples are first in all of
    them, and `samples.batch` is how many they are.
    """

    def add(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        if lazy:
            LAZY.add(rule)
        if views:
            MAKES_VIEWS.add(rule)
        return rule

    return add


def named(names: str) -> list[Any]:
    """Functions of torch and methods of tensors by their names."""
    functions = [getattr(owner, name, None) for owner in (torch, Tensor, torch.functional) for name in names.split()]
    return [function for function in functions if callable(function)]


@functools.lru_cache(maxsize=1024)
def name_of(function: Any) -> str:
    """The name of a torch function, for messages."""
    if isinstance(function, str):
        return function
    return resolve_name(function) or getattr(function, "__name__", str(function))


def writes(name: str) -> bool:
    """Is it the name of a function that writes into its first argument?"""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


@functools.lru_cache(maxsize=256)
def entered(function: Any) -> Any:
    """A function of torch that is written in Python, without its own look for overrides: what it calls comes to the recorder."""
    if not isinstance(function, types.FunctionType) or not function.__module__.startswith("torch."):
        return None
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **{check: lambda *_: False for check in checks}}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
