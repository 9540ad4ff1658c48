"""Presets, and how a recipe is made from a preset, a file and options.

A setting is named by its group and its name, such as `dpsgd.epochs` or `network.d`; the group may be left out where one group
of the preset alone has the name. A setting of a stage that the preset does not have is an error.
"""

from __future__ import annotations

import copy
import difflib
import math
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpformer.errors import DPFormerError
from dpformer.fit.recipe import STAGES, TRANSFORMER_ONLY, NetworkSettings, Recipe

Values = dict[str, Any]
_HISTOGRAM = {"stage": "histogram", "share": 0.03}
# DP-SGD alone. docs/statistics.md has what each setting is worth.
_DPSGD = {"max_length": 200, "vocabulary": 1500, "recency": 1.2}
_STEPS = {"stage": "dpsgd"}
# Earlier names that still work.
FORMER = {"pure": "dpformer", "whole": "default"}

PRESETS: dict[str, Values] = {
    # The Transformer of `dpformer` beside the transitions, from one budget: within 3 % of the better of `dpformer` and
    # `distilled` on both data sets from epsilon 5 on (docs/statistics.md, "Which preset").
    "default": {
        "network": _DPSGD,
        "stages": [_HISTOGRAM, {"stage": "transitions", "share": 0.5, "weight": 0.75}, _STEPS],
    },
    # The best Transformer trained by DP-SGD alone. Re-Attention is off: it did not pay (docs/reattention.md).
    "dpformer": {"network": _DPSGD, "stages": [_HISTOGRAM, _STEPS]},
    # The statistics with the whole budget, and a Transformer that learns from them: no steps on people's data, nobody is sampled.
    "distilled": {
        "network": {"d": 64, "max_length": 30, "vocabulary": 1500, "recency": 1.2},
        "stages": [_HISTOGRAM, {"stage": "transitions", "share": 0.97, "weight": 2.0}, {"stage": "distil"}],
    },
    # The paper's settings, with one choice of its grid of batch sizes and learning rates.
    "paper": {
        "network": {"d": 64, "blocks": 2, "norm": "post", "dropout": 0.2, "max_length": 200, "reattention": "logits"},
        "stages": [
            {"stage": "histogram", "share": 0.05},
            {"stage": "dpsgd", "epochs": 100.0, "batch_size": 1024, "learning_rate": 3e-3},
        ],
    },
    "transitions": {"stages": [_HISTOGRAM, {"stage": "transitions", "share": 0.97}]},
    "popularity": {"stages": [{"stage": "histogram", "share": 1.0}]},
}
# Presets without privacy: they are refused with a finite epsilon.
NOT_PRIVATE: dict[str, Values] = {
    # Of SASRec's size, with cross-entropy over all items: what the evaluation gives a Transformer without noise.
    "ceiling": {
        "network": {"d": 64, "blocks": 2, "dropout": 0.2, "max_length": 200, "recency": 1.2},
        "stages": [
            _HISTOGRAM,
            {"stage": "dpsgd", "epochs": 30.0, "batch_size": 16, "learning_rate": 2e-3},
        ],
    },
}


def named(preset: str) -> str:
    """The name of a preset, from this or its earlier one."""
    name = FORMER.get(preset, preset)
    if name not in PRESETS | NOT_PRIVATE:
        raise DPFormerError(f"no preset is called {preset!r}; there are: {', '.join(PRESETS | NOT_PRIVATE)}")
    return name


def make_recipe(preset: str = "default", file: Path | None = None, **options: Any) -> Recipe:
    """A recipe from a preset, then a TOML file, then options.

    Names of options: see above; `network`, `tuning` or a stage's name with a dict sets several; `stages` with a list of dicts
    replaces the preset's stages.
    """
    preset = named(preset)
    values, given_names = copy.deepcopy((PRESETS | NOT_PRIVATE)[preset]), set[str]()
    given = [(f"{file}: ", _read(file))] if file else []
    for where, source in [*given, ("", options)]:
        if "stages" in source:
            values["stages"] = _stages(where, source["stages"])
        for name, value in _flat(source):
            group, key = _place(where, name, values, preset)
            if key == "model" and value in ("transitions", "popularity"):
                raise DPFormerError(f"{where}model {value} is a preset now: use --preset {value}")
            _group(values, group)[key] = value
            given_names.add(key)
    if preset in NOT_PRIVATE and str(values.get("epsilon")) != "inf":
        raise DPFormerError(
            f"preset {preset!r} is training without privacy: give epsilon inf, or take --preset dpformer"
        )
    if (values.get("network") or {}).get("model", "transformer") != "transformer":
        # Settings of the preset that only a Transformer has; given ones are refused by the recipe.
        values["network"] = {
            name: value
            for name, value in values["network"].items()
            if name in given_names or name not in TRANSFORMER_ONLY
        }
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if not isinstance(part, int) and part != "stages"]
        message = first["msg"].removeprefix("Value error, ")
        shown = f", not {first['input']!r}" if len(place) and not isinstance(first["input"], dict) else ""
        raise DPFormerError(f"setting {'.'.join(place)!r}: {message}{shown}" if place else message) from None


def _stages(where: str, given: Any) -> list[Values]:
    """Stages that replace those of the preset."""
    names = list(STAGES)
    if isinstance(given, list | tuple) and all(isinstance(one, dict) and one.get("stage") in names for one in given):
        return [dict(one) for one in given]
    raise DPFormerError(
        f'{where}stages must be a list such as [{{"stage": "histogram"}}, {{"stage": "dpsgd", "epochs": 20}}]; there are: '
        f"{', '.join(names)}"
    )


def _flat(source: Values) -> list[tuple[str, Any]]:
    """Settings by dotted names; a table of a TOML file is a group."""
    result = []
    for name, value in source.items():
        if name == "stages":
            continue
        if isinstance(value, dict) and name != "tuning":
            result += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            result.append((name, value))
    return result


def _groups(values: Values) -> dict[str, Values]:
    """The groups of settings that are there; "" for those of the recipe itself."""
    network = {"network": values["network"]} if values.get("network") is not None else {}
    return {"": values, **network, **{stage["stage"]: stage for stage in values["stages"]}}


def _group(values: Values, name: str) -> Values:
    return _groups(values)[name]


def _fields(group: str) -> set[str]:
    if group == "":
        return set(Recipe.model_fields) - {"network", "stages"}
    return set(({"network": NetworkSettings} | STAGES)[group].model_fields) - {"stage"}


def _place(where: str, name: str, values: Values, preset: str) -> tuple[str, str]:
    """The group and the name of a setting."""
    group, dot, key = name.rpartition(".")
    every = ["", "network", *STAGES]
    having = [g for g in ([group] if dot else every) if g in every and key in _fields(g)]
    if not having:
        near = difflib.get_close_matches(key, sorted({field for g in every for field in _fields(g)}), n=1)
        raise DPFormerError(f"{where}unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    here = [g for g in having if g in _groups(values)]
    if not here:
        others = [other for other in PRESETS if set(having) & set(_groups(PRESETS[other]))]
        raise DPFormerError(
            f"{where}setting {name!r} is of {' and '.join(having)}, which preset {preset!r} does not have; presets that have it: "
            f"{', '.join(others)}"
        )
    if len(here) > 1:
        choices = " or ".join(f"{g}.{key}" for g in here)
        raise DPFormerError(f"{where}setting {name!r} is of more than one stage; give {choices}")
    return here[0], key


def _read(file: Path) -> Values:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DPFormerError(f"{file}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DPFormerError(f"{file}: is not TOML ({error})") from None


def command(recipe: Recipe) -> Values:
    """What to type for this recipe: the preset from which the fewest settings differ, and those. Ready for JSON."""
    asked = _all_settings(recipe)
    names = [stage.stage for stage in recipe.stages]
    presets = PRESETS | (NOT_PRIVATE if math.isinf(recipe.epsilon) else {})
    same = [preset for preset, values in presets.items() if [stage["stage"] for stage in values["stages"]] == names]
    ways = []
    for preset in same or [name for name in presets if ("network" in presets[name]) == (recipe.network is not None)]:
        fixed = {"epsilon": math.inf} if preset in NOT_PRIVATE else {}
        usual = _all_settings(Recipe.model_validate(presets[preset] | fixed))
        stages = {} if same else {"stages": recipe.settings()["stages"]}
        changed = {
            name: value
            for name, value in asked.items()
            if name != "epsilon" and value != usual.get(name, value) and (same or name.partition(".")[0] not in STAGES)
        }
        ways.append((preset, {**stages, **changed}))
    preset, changed = min(ways, key=lambda way: len(way[1]))
    return {"preset": preset, "epsilon": asked["epsilon"], "set": changed}


def _all_settings(recipe: Recipe) -> Values:
    """Every setting of a recipe by its dotted name, ready for JSON."""
    return {
        f"{group}.{name}" if group else name: values[name]
        for group, values in _groups(recipe.settings()).items()
        for name in values
        if name in _fields(group)
    }
