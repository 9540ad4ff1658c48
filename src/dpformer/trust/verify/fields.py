"""Everything in a run folder, against a list of what may be in it and why.

    public      chosen by the owner or the same for every run: settings, versions, names
    charged     made of answers alone, whose noise was paid for: tensors, answers, entries of the ledger
    labelled    the statement says what is assumed of it (the catalogue), or it is marked `not private` and is for its owner only

A file or a field outside of the list is a failure: it may hold anything.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save as to_safetensors

from dpformer.artifact import Artifact
from dpformer.artifact.card import model_card
from dpformer.artifact.layout import (
    ANSWERS,
    CARD,
    CONFIG,
    EVENTS,
    FILES,
    ITEMS,
    LEDGER,
    LEDGER_HEAD,
    LOCAL,
    LOCK,
    METRICS,
    MODEL,
    PRIOR,
    PRIVACY,
    SPEC,
)
from dpformer.files import read_json
from dpformer.fit.presets import command
from dpformer.fit.recipe import Recipe
from dpformer.trust.verify.checks import Outcome

# Fields of files that are not compared as a whole, by their reason.
ALLOWED: dict[str, dict[str, str]] = {
    CONFIG: dict.fromkeys(("format", "version", "dpformer", "torch", "python", "recipe", "command", "log"), "public"),
    FILES: dict.fromkeys((CONFIG, SPEC, PRIVACY, MODEL, ITEMS), "charged"),
    ITEMS: dict.fromkeys(("item", "item_id", "title"), "labelled"),
    LEDGER: dict.fromkeys(("name", "tag", "n", "previous", "hash"), "charged"),
    f"{LEDGER}, first line": dict.fromkeys(("ledger", "run_id", "plan", "receipt", "n", "previous", "hash"), "public"),
    LEDGER_HEAD: dict.fromkeys(("entries", "hash"), "charged"),
    f"{ANSWERS}/run.json": dict.fromkeys(("seed", "threads"), "public"),
    ANSWERS: dict.fromkeys(("name", "noise_std", "grid", "labels"), "charged"),
}
# Computed without noise, or about the machine: for the owner only.
OWNER_ONLY = (EVENTS, METRICS, LOCAL)
EMPTY = (LOCK, "ledger.lock")
# Compared as a whole with what dpformer makes of the rest.
WHOLE = (SPEC, MODEL, PRIVACY, CARD)


def fields(folder: Path, artifact: Artifact, recipe: Recipe) -> Outcome:
    """Every file and field of the folder is on the list, and says what it must."""
    problems = [*_unknown_files(folder), *_unknown_fields(folder), *_other_content(folder, artifact, recipe)]
    count = sum(len(names) for names in ALLOWED.values())
    detail = f"all files and {count} kinds of fields are public, charged or labelled"
    return Outcome(not problems, "; ".join(problems) or detail, {"problems": problems})


def _unknown_files(folder: Path) -> Iterator[str]:
    known = {*WHOLE, *OWNER_ONLY, *EMPTY, ANSWERS, PRIOR, CONFIG, FILES, ITEMS, LEDGER, LEDGER_HEAD}
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            yield f"{path.name} is not on the list"
        elif path.name in OWNER_ONLY and stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield f"{path.name} was computed without noise, and others may read it"
        elif path.name in EMPTY and path.stat().st_size:
            yield f"{path.name} is not empty"


def _unknown_fields(folder: Path) -> Iterator[str]:
    for name in (CONFIG, FILES, LEDGER_HEAD):
        if (folder / name).exists():
            yield from _outside(name, read_json(folder / name))
    for line in (folder / ITEMS).read_bytes().splitlines():
        yield from _outside(ITEMS, json.loads(line))
    if (folder / LEDGER).exists():
        for number, line in enumerate((folder / LEDGER).read_bytes().splitlines()):
            yield from _outside(LEDGER if number else f"{LEDGER}, first line", json.loads(line))
    for path in sorted((folder / ANSWERS).iterdir()) if (folder / ANSWERS).is_dir() else ():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as file:
                yield from _outside(ANSWERS, file.metadata())
        elif path.name == "run.json":
            yield from _outside(f"{ANSWERS}/run.json", read_json(path))
        else:
            yield f"{ANSWERS}/{path.name} is not on the list"


def _outside(file: str, given: Any) -> Iterator[str]:
    names = given.keys() if isinstance(given, dict) else {"something else than fields"}
    yield from (f"{file}: {name!r} is not on the list" for name in sorted(names - ALLOWED[file].keys()))


def _other_content(folder: Path, artifact: Artifact, recipe: Recipe) -> Iterator[str]:
    config = artifact.config
    state = {name: value.contiguous() for name, value in artifact.model.state_dict().items()}
    expected: dict[str, tuple[Any, Any]] = {
        CONFIG: (config["recipe"], recipe.settings()),
        f"{CONFIG}: command": (config["command"], json.loads(json.dumps(command(recipe)))),
        f"{CONFIG}: log": (set(artifact.log) - {"columns", "options", "preparing", "date", "command"}, set()),
        SPEC: (read_json(folder / SPEC), artifact.model.spec.model_dump(mode="json")),
        MODEL: ((folder / MODEL).read_bytes(), to_safetensors(state)),
        PRIVACY: (read_json(folder / PRIVACY), json.loads(artifact.statement.to_json())),
        CARD: ((folder / CARD).read_text(), model_card(artifact.model.spec, artifact.statement, config)),
    }
    for name, (found, made) in expected.items():
        if found != made:
            yield f"{name} has something that the rest of the folder does not explain"
    for name in ("dpformer", "torch", "python"):
        if len(str(config[name])) > 40:
            yield f"{CONFIG}: {name} is not a version"
