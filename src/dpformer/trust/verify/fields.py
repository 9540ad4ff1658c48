"""Everything in a run folder, against a list of what may be in it and why; and no pickles.

    public      chosen by the owner or the same for every run: settings, versions, names
    charged     made of answers alone, whose noise was paid for: tensors, answers, entries of the ledger
    labelled    the statement says what is assumed of it (the catalogue), or it is marked `not private` and is for its owner only

A file or a field outside of the list is a failure: it may hold anything.
"""

from __future__ import annotations

import json
import pickletools
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save as to_safetensors

from dpformer.artifact import Artifact
from dpformer.artifact import layout as files
from dpformer.artifact.card import model_card
from dpformer.files import read_json
from dpformer.fit.presets import command
from dpformer.fit.prior import read_prior
from dpformer.fit.prior import to_bytes as prior_bytes
from dpformer.fit.recipe import Recipe
from dpformer.trust.verify.checks import Outcome

# Fields of files that are not compared as a whole, by their reason.
_HEADER, _ABOUT = f"{files.LEDGER}, first line", f"{files.ANSWERS}/run.json"
_CONFIG = ("format", "version", "dpformer", "torch", "python", "recipe", "command", "log")
ALLOWED: dict[str, dict[str, str]] = {
    files.CONFIG: dict.fromkeys(_CONFIG, "public"),
    files.FILES: dict.fromkeys((files.CONFIG, files.SPEC, files.PRIVACY, files.MODEL, files.ITEMS), "charged"),
    files.ITEMS: dict.fromkeys(("item", "item_id", "title"), "labelled"),
    files.LEDGER: dict.fromkeys(("name", "tag", "n", "previous", "hash"), "charged"),
    _HEADER: dict.fromkeys(("ledger", "run_id", "plan", "receipt", "n", "previous", "hash"), "public"),
    files.LEDGER_HEAD: dict.fromkeys(("entries", "hash"), "charged"),
    _ABOUT: dict.fromkeys(("seed", "threads"), "public"),
    files.ANSWERS: dict.fromkeys(("name", "noise_std", "grid", "labels"), "charged"),
}
# Computed without noise, or about the machine: for the owner only.
OWNER_ONLY = (files.EVENTS, files.METRICS, files.LOCAL)
EMPTY = (files.LOCK, "ledger.lock")
# Compared as a whole with what dpformer makes of the rest.
WHOLE = (files.SPEC, files.MODEL, files.PRIVACY, files.CARD)
PICKLE_NAMES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill")


def fields(folder: Path, artifact: Artifact, recipe: Recipe) -> Outcome:
    """Every file and field of the folder is on the list, and says what it must."""
    problems = [*_unknown_files(folder), *_unknown_fields(folder, artifact), *_other_content(folder, artifact, recipe)]
    count = sum(len(names) for names in ALLOWED.values())
    detail = f"all files and {count} kinds of fields are public, charged or labelled"
    return Outcome(not problems, "; ".join(problems) or detail, {"problems": problems})


def _unknown_files(folder: Path) -> Iterator[str]:
    parts = {name for name in ALLOWED if "/" not in name and "," not in name}
    allowed = {*parts, *WHOLE, *OWNER_ONLY, *EMPTY, files.PRIOR}
    for path in sorted(folder.iterdir()):
        if path.name not in allowed:
            yield f"{path.name} is not on the list"
        elif path.name in OWNER_ONLY and stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield f"{path.name} was computed without noise, and others may read it"
        elif path.name in EMPTY and path.stat().st_size:
            yield f"{path.name} is not empty"


def _unknown_fields(folder: Path, artifact: Artifact) -> Iterator[str]:
    for name in (files.CONFIG, files.FILES, files.LEDGER_HEAD):
        if (folder / name).exists():
            yield from _outside(name, read_json(folder / name))
    # Columns of a declared catalogue are public; those of a log would come from people's events.
    declared = artifact.statement.data.catalogue == "public"
    for line in () if declared else (folder / files.ITEMS).read_bytes().splitlines():
        yield from _outside(files.ITEMS, json.loads(line))
    if (folder / files.LEDGER).exists():
        for number, line in enumerate((folder / files.LEDGER).read_bytes().splitlines()):
            yield from _outside(files.LEDGER if number else _HEADER, json.loads(line))
    for path in sorted((folder / files.ANSWERS).iterdir()) if (folder / files.ANSWERS).is_dir() else ():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as file:
                yield from _outside(files.ANSWERS, file.metadata())
        elif path.name == "run.json":
            yield from _outside(_ABOUT, read_json(path))
        else:
            yield f"{files.ANSWERS}/{path.name} is not on the list"


def _outside(file: str, given: Any) -> Iterator[str]:
    names = given.keys() if isinstance(given, dict) else {"something else than fields"}
    yield from (f"{file}: {name!r} is not on the list" for name in sorted(names - ALLOWED[file].keys()))


def _other_content(folder: Path, artifact: Artifact, recipe: Recipe) -> Iterator[str]:
    config, model = artifact.config, artifact.model
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    log = set(artifact.log) - {"columns", "options", "preparing", "date", "command"}
    expected: dict[str, tuple[Any, Any]] = {
        files.CONFIG: (config["recipe"], recipe.settings()),
        f"{files.CONFIG}: command": (config["command"], json.loads(json.dumps(command(recipe)))),
        f"{files.CONFIG}: log": (log, set()),
        files.SPEC: (read_json(folder / files.SPEC), model.spec.model_dump(mode="json")),
        files.MODEL: ((folder / files.MODEL).read_bytes(), to_safetensors(state)),
        files.PRIVACY: (read_json(folder / files.PRIVACY), json.loads(artifact.statement.to_json())),
        files.CARD: ((folder / files.CARD).read_text(), model_card(model.spec, artifact.statement, config)),
    }
    if (prior := read_prior(folder)) is not None:
        expected[files.PRIOR] = ((folder / files.PRIOR).read_bytes(), prior_bytes(prior))
    for name, (stored, made) in expected.items():
        if stored != made:
            yield f"{name} has something that the rest of the folder does not explain"
    for name in ("dpformer", "torch", "python"):
        if len(str(config[name])) > 40:
            yield f"{files.CONFIG}: {name} is not a version"


def no_pickle(folder: Path) -> Outcome:
    """No file of the folder is a pickle or holds one, whatever it is called: loading a pickle runs its code."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    bad = [str(path.relative_to(folder)) for path in paths if holds_pickle(path)]
    detail = f"holds pickled objects: {', '.join(bad)}" if bad else f"{len(paths)} files, none of them"
    return Outcome(not bad, detail, {"files": len(paths), "pickles": bad})


def holds_pickle(path: Path) -> bool:
    """By suffix, by content as a pickle of any protocol, as a zip of torch or numpy that holds one, as an array of objects."""
    if path.suffix.lower() in PICKLE_NAMES:
        return True
    with open(path, "rb") as file:
        head = file.read(128)
        if head.startswith(b"\x93NUMPY"):
            return b"'|O" in head
        file.seek(0)
        try:
            for _ in pickletools.genops(file):
                pass  # reads opcodes, runs none
            return True
        except (ValueError, EOFError, KeyError, IndexError, OverflowError, MemoryError):
            pass
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".pkl", ".pickle")) for name in archive.namelist())
    return False
