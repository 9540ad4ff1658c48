"""The options of `fit` that decide a recipe and its budget; `plan` has the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpformer.fit.recipe import Recipe
    from dpformer.privacy.account import PeopleAccount

Epsilon = Annotated[float | None, typer.Option(help="The budget; inf trains without privacy.")]
Delta = Annotated[float | None, typer.Option(help="Must be below 1 / users.")]
Model = Annotated[str | None, typer.Option(help="The network: transformer, gru or lstm.")]
Preset = Annotated[
    str,
    typer.Option(
        help="default, pure (DP-SGD alone), whole (with statistics), paper; transitions, popularity (no network)."
    ),
]
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, as name=value; repeat for more. See docs/training.md.")
]
Population = Annotated[
    int | None,
    typer.Option(help="A public number of users for rate and delta, at least the number in the data (the default)."),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Noise from a given seed, which anyone can subtract: research only, marked insecure."),
]
AccountFolder = Annotated[
    Path | None,
    typer.Option("--account", help="The account of these people (`dpformer account new`), charged before the start."),
]


def recipe_of(preset: str, config: Path | None, setting: list[str] | None, **flags: Any) -> Recipe:
    """The recipe for these options; flags that are None were not given."""
    from dpformer.fit.presets import make_recipe

    given = {name: value for name, value in flags.items() if value is not None}
    return make_recipe(preset, config, **given, **_settings(setting or []))


def account_of(folder: Path | None) -> PeopleAccount | None:
    """The account, which must exist."""
    from dpformer.privacy.account import PeopleAccount

    if folder is None:
        return None
    account = PeopleAccount(folder)
    account.read()
    return account


def _settings(pairs: list[str]) -> dict[str, Any]:
    import json

    from dpformer.errors import DPFormerError

    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise DPFormerError(f"--set {pair!r} is not name=value")
        try:
            settings[key.strip().replace("-", "_")] = json.loads(text)
        except ValueError:
            settings[key.strip().replace("-", "_")] = text
    return settings
