"""Recipes that train in a moment."""

from typing import Any

from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe

# One pre-norm block over the whole catalogue, without dropout and Re-Attention: preset `paper`, made plain.
PLAIN: dict[str, Any] = {
    "d": 32,
    "max_length": 50,
    "blocks": 1,
    "norm": "pre",
    "dropout": 0.0,
    "reattention": "off",
    "batch_size": None,
    "epochs": 60.0,
    "learning_rate": 2e-2,
}
SMALL: dict[str, Any] = {"d": 8, "max_length": 6, "epochs": 2.5}
BUDGET: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-3, "seed": 1}


def plain_recipe(histogram: bool = True, **options: Any) -> Recipe:
    """A plain network trained by DP-SGD; without the histogram on request."""
    recipe = make_recipe("paper", **{**PLAIN, **options})
    if histogram:
        return recipe
    steps = recipe.settings()["stages"][-1]
    return make_recipe("paper", stages=[steps], **{**PLAIN, **options})


def small_recipe(preset: str | None = None, **options: Any) -> Recipe:
    """A seeded recipe of 10 steps; of a preset without steps, its own."""
    if preset is None:
        return plain_recipe(**{**BUDGET, **SMALL, **options})
    return make_recipe(preset, **{**BUDGET, **options})
