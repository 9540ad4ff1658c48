"""Small trainings with random settings for a given time, every invariant checked after each, and memory watched.

    python scripts/soak.py --minutes 10 [--seed 0] [--json]

For each run: no user contributes more than the clipping norm; the statement says what the ledger says, and no more than the
budget; a copy that is stopped at a random step and resumed gives the same bits; model and metrics are finite; nobody's id is in
the folder; private state is gone. Over all runs: resident memory does not grow, nor do open files. Exit code 1 on a breach.
"""

# ruff: noqa: E402  the number of threads is fixed before numpy and torch are imported

import argparse
import gc
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

for threads in ("OMP_NUM_THREADS", "POLARS_MAX_THREADS"):
    os.environ.setdefault(threads, "1")

import numpy as np
import polars as pl
import torch
from safetensors.torch import load_file

from dpformer import load_model
from dpformer.data import load, prepare, save
from dpformer.evaluation import evaluate, held_out
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import Run, resume, start
from dpformer.privacy import Sample, parse_statement, read_ledger
from dpformer.privacy.query import grid_step

MARK = "Zq7-unmistakable"


def make_log(dice: random.Random) -> pl.DataFrame:
    """Some people on some items; a few have a single event, a few have many."""
    users, items = dice.randint(20, 120), dice.randint(3, 60)
    rows = []
    for user in range(users):
        length = 2 if user == 0 else max(1, int(dice.paretovariate(1.2)) + dice.randint(0, 6))
        rows += [(f"{MARK}-{user}", f"i{dice.randrange(items)}", k) for k in range(min(length, 200))]
    return pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")


def make_settings(dice: random.Random) -> dict[str, Any]:
    """A preset and settings that make sense together, anywhere in their ranges."""
    preset = dice.choice(["dpformer"] * 2 + ["paper"] * 2 + ["default", "distilled", "popularity", "transitions"])
    settings: dict[str, Any] = {"preset": preset, "epsilon": dice.choice([0.5, 2.0, 8.0, 30.0]), "delta": 1e-3}
    settings |= dice.choice([{}, {"seed": dice.randrange(1000)}])
    if preset in ("popularity", "transitions"):
        return settings
    model = dice.choice(["transformer"] * 4 + ["gru", "lstm"])
    settings |= {
        "model": model,
        "d": dice.choice([1, 2, 4, 8, 32]),
        "max_length": dice.choice([1, 2, 7, 30]),
        "dropout": dice.choice([0.0, 0.0, 0.3]),
        "tied": dice.random() < 0.8,
        "vocabulary": dice.choice([None, 5, 1000]),
        "recency": dice.choice([None, 1.2]) if model == "transformer" else None,
        "reattention": "off",
    }
    if model == "transformer":
        settings |= {"blocks": dice.choice([1, 2]), "norm": dice.choice(["pre", "post"])}
    if preset == "distilled":
        return settings | {"distil.steps": 2}  # a run that is stopped before its end begins with them again
    settings |= {
        "batch_size": dice.choice([None, 1, 8, 1000]),
        "epochs": dice.choice([0.5, 1.0, 3.0]),
        "learning_rate": dice.choice([1e-3, 2e-2, 0.5]),
        "max_norm": dice.choice([None, None, 0.01, 1.0, 20.0]),
    }
    if preset == "default":
        return settings | {"transitions.share": dice.choice([0.1, 0.5])}
    if dice.random() < 0.25:
        settings |= {"stages": [{"stage": "dpsgd"}], "vocabulary": None}
    else:
        settings["histogram.share"] = dice.choice([0.01, 0.05, 0.5])
        if model == "transformer":
            settings["reattention"] = dice.choice(["off", "logits", "literal", "none"])
    if dice.random() < 0.1:
        settings["epsilon"] = math.inf
    return settings


def soak_one(work: Path, dice: random.Random) -> tuple[Counter[str], list[str]]:
    """One data set, one recipe, trained in one go and in pieces; what was checked, and what is wrong."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    save(prepare(make_log(dice)), work / "data")
    recipe = make_recipe(**make_settings(dice))
    checked: Counter[str] = Counter()
    wrong: list[str] = []

    def check(name: str, sound: bool, figure: object = "") -> None:
        checked[name] += 1
        if not sound:
            wrong.append(f"{name}: {figure} with {recipe.model_dump_json()}")

    run = start(work / "run", work / "data", recipe)
    shutil.copytree(work / "run", work / "copy")  # the first checkpoint, with the noise that is to come
    if recipe.steps_on_data:
        run.begin_steps()
        check("norm bound", *norm_bound(run, dice))
    check("released", run.train())
    if recipe.steps_on_data:
        check("norm bound", *norm_bound(run, dice))
    run.close()
    finish_in_pieces(work / "copy", dice)
    same = all((work / "run" / n).read_bytes() == (work / "copy" / n).read_bytes() for n in ("model.safetensors",))
    check("resume equality", same)
    check("private state is gone", not (work / "run" / "private").exists())
    tensors = load_file(work / "run" / "model.safetensors")
    infinite = [name for name, value in tensors.items() if not bool(torch.isfinite(without_padding(name, value)).all())]
    check("finite model", not infinite, infinite)
    statement = parse_statement((work / "run" / "privacy.json").read_bytes())
    if statement.private:
        for folder in (work / "run", work / "copy"):
            check_account(folder, recipe, check)
    held = held_out(load(work / "data").sequences, "test")
    if len(held.targets):
        model = load_model(work / "run")
        figures = evaluate(model, held, len(model.catalogue)).figures()
        check("finite metrics", all_finite(figures), figures)
    names = [path for path in (work / "run").rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]
    check("no user in the folder", not names, names)
    return checked, wrong


def without_padding(name: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a model; of scores of all items, those of the items: that of the padding is -inf."""
    return value[1:] if name.rpartition(".")[2] in ("output_bias", "tail", "counts") else value


def norm_bound(run: Run, dice: random.Random) -> tuple[bool, float]:
    """The largest contribution of some single users to the clipped sum, in units of C."""
    trainer, largest = run.trainer, 0.0
    if not trainer.plan.private:
        return True, 0.0
    query, people = trainer.query, run.dataset.train(run.recipe.hold_out)
    grid = grid_step(query.bound, query.numbers)
    trainer.model.train()
    for user in dice.sample(range(trainer.plan.users), 5):
        sums = query.sum(people, Sample(np.array([user]), bytes(32)), grid)
        squares = sum(float((value.astype(np.float64) ** 2).sum()) for value in sums.values())
        largest = max(largest, math.sqrt(squares) * grid / query.bound)
    return largest <= query.sensitivity(grid) * grid / query.bound, largest


def finish_in_pieces(folder: Path, dice: random.Random) -> None:
    """Stop and resume at random until the run is done."""
    for _ in range(1000):
        run = resume(folder)
        left = dice.randint(1, 8)
        steps = iter(range(1, 10**6))
        done = run.train(should_stop=lambda steps=steps, left=left: next(steps) >= left)  # type: ignore[misc]
        run.close()
        if done:
            return
    raise AssertionError("does not come to an end")


def check_account(folder: Path, recipe: Recipe, check: Any) -> None:
    """The statement against the ledger, read anew."""
    statement, account = parse_statement((folder / "privacy.json").read_bytes()), read_ledger(folder)
    said, position = statement.ledger, account.position
    check("ledger = statement", said is not None and (said.entries, said.hash) == (position.entries, position.hash))
    stated = 0 if statement.steps is None else statement.steps.charged
    check("steps charged", stated == account.steps_charged == account.plan.steps, account.steps_charged)
    check("within the budget", float(statement.epsilon) <= recipe.epsilon * (1 + 1e-9), statement.epsilon)
    check("every answer once", len({entry.tag for entry in account.entries}) == len(account.entries))


def all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(all_finite(part) for part in value.values())
    if isinstance(value, list | tuple):
        return all(all_finite(part) for part in value)
    return not isinstance(value, float) or math.isfinite(value)


def footprint() -> dict[str, float]:
    """Resident memory in MB, open files, threads."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(os.listdir("/proc/self/fd"))
    return {"rss": int(status["VmRSS"].split()[0]) / 1024, "files": files, "threads": int(status["Threads"])}


def growth(values: list[float]) -> dict[str, float]:
    """Least-squares slope a run over the second half, and the medians of the third and the last quarter."""
    half = np.array(values[len(values) // 2 :])
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 2 else 0.0
    cut = max(1, len(half) // 2)
    return {"slope": slope, "third": float(np.median(half[:cut])), "last": float(np.median(half[-cut:]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, number = time.monotonic() + 60 * options.minutes, 0
    total: Counter[str] = Counter()
    wrong: list[str] = []
    prints: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="dpformer-soak-") as folder:
        while time.monotonic() < end or number < 2:
            checked, problems = soak_one(Path(folder) / "work", random.Random(1000 * options.seed + number))
            total += checked
            wrong += [f"run {number}: {problem}" for problem in problems]
            prints.append(footprint())
            number += 1
            if not options.json and number % 10 == 0:
                print(f"{number:5} runs, {total.total():6} checks, {len(wrong)} wrong, {prints[-1]}", flush=True)
    memory = growth([p["rss"] for p in prints])
    # Less than 5 % between the medians of the last two quarters, once there are enough runs to tell.
    flat = number < 20 or memory["last"] < 1.05 * memory["third"]
    leak = number >= 20 and (prints[-1]["files"] > prints[number // 2]["files"] + 2)
    report = {"runs": number, "checks": dict(total), "wrong": wrong, "memory": memory, "flat": flat, "last": prints[-1]}
    print(json.dumps(report, indent=2))
    sys.exit(bool(wrong) or not flat or leak)


if __name__ == "__main__":
    main()
