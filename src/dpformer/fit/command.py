"""What to type to make a run like another one: its preset, and the settings that differ from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpformer.errors import DPFormerError
from dpformer.fit.recipe import PRESETS, Recipe, make_recipe


def command(recipe: Recipe) -> dict[str, Any]:
    """The preset from which the fewest settings differ, for `report` and the model card; ready for JSON."""
    preset, changed = min(_from_presets(recipe), key=lambda way: len(way[1]))
    options = {"preset": preset, "model": recipe.model, "epsilon": recipe.settings()["epsilon"]}
    return {**options, "set": changed}


def _from_presets(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each preset, and what has to be set beside it for this recipe."""
    asked = recipe.model_dump(mode="json")
    for preset in PRESETS:
        try:
            base = make_recipe(preset, epsilon=recipe.epsilon, model=recipe.model).model_dump(mode="json")
        except DPFormerError:  # made for other models
            continue
        yield preset, {key: value for key, value in asked.items() if value != base[key] and key != "epsilon"}
