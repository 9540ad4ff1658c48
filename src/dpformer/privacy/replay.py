"""Recorded answers: kept in a run folder, and given again with no data at hand.

Answers have their noise and were charged, so keeping them costs no privacy. What is made of them can be made again from the
recording alone, and must be the same (see `trust.verify`). A run without noise keeps none.

    answers/run.json              seed of the initial weights (never of the noise), number of threads
    answers/000000.safetensors    whole steps of the grid, int64, by name; name, noise, grid and labels in the header
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.files import read_json, readable, write_file, write_json
from dpformer.privacy.plan import GRADIENTS, PrivacyPlan
from dpformer.privacy.query import Answer, Query
from dpformer.privacy.selection import Selection

# Steps whose answers take more than this in all are not kept: 20 steps of 40,000 numbers take 6 MB, 590 of 280,000 take 1.3 GB.
MOST_BYTES = 1 << 28
# One answer: 250 million numbers. A file may be sparse, so that it takes no room on disk.
_MOST_BYTES_EACH = 1 << 31
_MOST_THREADS = 4096
_ABOUT = "run.json"


class AnswerFiles:
    """The answers of a run in a folder. seed, threads: what making the model again needs beside them; both are public."""

    def __init__(self, folder: Path, seed: int, threads: int) -> None:
        self.folder = folder
        self._about = {"seed": seed, "threads": threads}

    def keep(self, place: int, answer: Answer, plan: PrivacyPlan) -> None:
        """Write the answer number `place`. The same answer again, after a crash, has the same bytes."""
        if answer.name == GRADIENTS and 8 * plan.steps * answer.numbers > MOST_BYTES:
            return
        if not (self.folder / _ABOUT).exists():
            self.folder.mkdir(mode=0o755, exist_ok=True)
            write_json(self.folder / _ABOUT, self._about)
        steps = {
            name: np.ascontiguousarray(value / answer.grid, dtype=np.int64) for name, value in answer.values.items()
        }
        header = {"name": answer.name, "noise_std": answer.noise_std.hex(), "grid": answer.grid.hex()}
        header["labels"] = json.dumps(list(answer.labels))
        write_file(self.folder / f"{place:06d}.safetensors", save(steps, header))


def read_answers(folder: Path) -> tuple[dict[str, int], list[Answer]]:
    """seed and threads, and all answers in their order. A `DPFormerError` if one is missing or damaged; nothing is trusted."""
    about = read_json(folder / _ABOUT)
    types = {name: type(value) for name, value in about.items()} if isinstance(about, dict) else {}
    if types != {"seed": int, "threads": int} or not 0 < about["threads"] <= _MOST_THREADS:
        raise DPFormerError(f"{folder / _ABOUT}: is damaged; it needs a seed and a number of threads")
    files = sorted(folder.glob("*.safetensors"))
    if [path.name for path in files] != [f"{place:06d}.safetensors" for place in range(len(files))]:
        raise DPFormerError(f"{folder}: an answer is missing between others; it cannot be replayed")
    return about, [_read_answer(path) for path in files]


def _read_answer(path: Path) -> Answer:
    try:
        with readable(path), safe_open(path, framework="numpy") as file:
            if path.stat().st_size > _MOST_BYTES_EACH:
                raise ValueError("it is larger than any that dpformer writes")
            header = file.metadata()
            grid, noise = float.fromhex(header["grid"]), float.fromhex(header["noise_std"])
            if not (0 < grid < math.inf and 0 < noise < math.inf):
                raise ValueError("its grid or its noise is not a positive number")
            steps = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if any(value.dtype != np.int64 for value in steps.values()):
            raise ValueError("its numbers are not whole")
        labels = tuple(json.loads(header["labels"]))
        return Answer(header["name"], {name: value * grid for name, value in steps.items()}, noise, grid, labels)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, SafetensorError) as error:
        raise DPFormerError(f"{path}: cannot be read ({error}); it is damaged") from None


class Replay:
    """An `Asker` that gives recorded answers and has no data. place: of the next one."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers, self.place = tuple(answers), 0

    def ask(self, query: Query[Any]) -> Answer:
        """The next answer; a `PrivacyError` if it answers another query."""
        if self.place == len(self.answers):
            raise PrivacyError(f"query {query.name!r} was asked, and the recording has {self.place} answers only")
        answer = self.answers[self.place]
        if answer.name != query.name or not (isinstance(query, Selection) or answer.numbers == query.numbers):
            raise PrivacyError(
                f"query {query.name!r} of {query.numbers:,} numbers was asked, and answer {self.place} of the recording is "
                f"{answer.name!r} of {answer.numbers:,}"
            )
        self.place += 1
        return answer
