"""What a released folder must not hold: a hash that confirms a guess of the data, or a key of the noise.

The attacker of the first test knows all of the data, and only wants it confirmed. That of the others has the seed of a run that
was made with one, so every key can be computed and searched for; and what a seed gives away is shown too, as the statement warns.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dpformer.data import Sequences, demo_frame, load, prepare, save
from dpformer.fit.presets import make_recipe
from dpformer.privacy import Answer, Curator, Keys, Sample, read_ledger
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.query import Query, grid_step
from dpformer.statistics.histogram import Histogram
from tests.attacks.folders import emptied, release

SEED = 20
# The name of a query, what it sums to without noise, the grid, and the noise in grid steps.
Summed = tuple[str, dict[str, np.ndarray], float, float]
KINDS = ("distilled", "popularity", "pure")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "data"
    log = demo_frame()
    save(prepare(log.filter(log["user_id"] < "reader-0200")), folder)
    return folder


class Witness(Curator[Sequences]):
    """The product, which shows the attacker every exact sum."""

    def __init__(self, sums: list[Summed], *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._sums = sums

    def ask(self, query: Query[Sequences]) -> Answer:
        shown: list[dict[str, np.ndarray]] = []
        answer = super().ask(_Showing(query, shown))
        self._sums.append((query.name, shown[0], answer.grid, answer.noise_std / answer.grid))
        return answer


class _Showing:
    """A query that keeps what it sums to."""

    def __init__(self, query: Query[Sequences], sums: list[dict[str, np.ndarray]]) -> None:
        self._query, self._sums = query, sums
        self.name, self.bound, self.numbers, self.sensitivity = (
            query.name,
            query.bound,
            query.numbers,
            query.sensitivity,
        )

    def sum(self, people: Sequences, sample: Sample, grid: float) -> dict[str, np.ndarray]:
        sums = dict(self._query.sum(people, sample, grid))
        self._sums.append(sums)
        return sums


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory):
    """A released folder of a seeded run, and its exact sums in their order."""
    options = {"epsilon": 8.0, "seed": SEED}
    if request.param == "popularity":
        recipe = make_recipe("popularity", **options)
    elif request.param == "distilled":
        recipe = make_recipe("distilled", **options, **{"distil.steps": 1})
    else:
        recipe = make_recipe("pure", **options, batch_size=30, epochs=0.5, d=8, max_length=10, vocabulary=50)
    sums: list[Summed] = []
    folder = release(tmp_path_factory.mktemp("runs") / "run", data, recipe, partial(Witness, sums))
    return folder, sums


def occurrences(folder: Path, needles: dict[str, bytes]) -> list[tuple[str, str]]:
    """(what, file) for each of some bytes that a file of the folder holds: as they are, in hexadecimal, or in base 64."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for what, needle in needles.items():
            # Half of a hash would confirm a guess as well.
            forms = (
                needle[:16],
                needle[:16].hex().encode(),
                needle[:16].hex().upper().encode(),
                base64.b64encode(needle)[:20],
            )
            if any(form in content for form in forms):
                found.append((what, path.name))
    return found


def hashes_of(data: Path, sums: list[Summed]) -> Iterator[tuple[str, bytes]]:
    """Hashes without a key by which somebody who has the right data would know it: of files, arrays and sums."""
    dataset = load(data)
    for path in sorted(data.iterdir()):
        if path.suffix in (".parquet", ".json"):
            yield path.name, path.read_bytes()
    for name, people in (("all", dataset.sequences), ("training", dataset.train("validation"))):
        yield f"{name} items", people.items.tobytes()
        yield f"{name} offsets", people.offsets.tobytes()
        yield f"{name} items and offsets", people.items.tobytes() + people.offsets.tobytes()
    for place, (name, arrays, grid, std) in enumerate(sums):
        raw = b"".join(arrays[key].tobytes() for key in sorted(arrays))
        yield f"sum {place} {name}", raw
        yield f"sum {place} {name} as float64", b"".join(arrays[key].astype(float).tobytes() for key in sorted(arrays))
        framed = b""
        for key in sorted(arrays):
            head = f"{key} {arrays[key].shape}".encode()
            framed += len(head).to_bytes(8, "little") + head + arrays[key].tobytes()
        yield f"sum {place} {name} framed", framed
        yield f"sum {place} {name} with its noise", f"{grid.hex()} {std.hex()}".encode() + framed


def digests(contents: Iterator[tuple[str, bytes]]) -> dict[str, bytes]:
    kinds = (hashlib.sha256, hashlib.sha1, hashlib.md5, hashlib.blake2b)
    return {f"{kind.__name__} of {what}": kind(content).digest() for what, content in contents for kind in kinds}


def test_no_hash_confirms_a_guess_of_the_data(run, data):
    folder, sums = run
    needles = digests(hashes_of(data, sums))
    assert not occurrences(folder, needles)
    # The search finds what is there: files.json lists the hashes of what is released.
    assert occurrences(folder, {"model": hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()})
    (folder / "planted.txt").write_text(next(iter(needles.values())).hex())
    assert occurrences(folder, needles)
    (folder / "planted.txt").unlink()


def framed_digest(arrays: dict[str, np.ndarray], grid: float, std: float) -> bytes:
    """SHA-256 over grid, noise (in grid steps), and all arrays with their names and shapes, in the order of the names."""
    framed = hashlib.sha256(f"{grid.hex()} {std.hex()}".encode())
    for key in sorted(arrays):
        head = f"{key} {arrays[key].shape}".encode()
        framed.update(len(head).to_bytes(8, "little") + head + arrays[key].tobytes())
    return framed.digest()


def test_no_file_holds_a_key(run):
    folder, sums = run
    keys = Keys(SEED)
    secret, derived, tags = {}, {}, {}
    for place, (name, arrays, grid, std) in enumerate(sums):
        digest = framed_digest(arrays, grid, std)
        secret[f"secret {place}"] = bytes.fromhex(str(keys.state()["secret"]))
        derived |= {f"noise of {key} {place}": keys.noise(key, digest) for key in arrays}
        derived |= {f"sample {place}": keys.sample(), f"dropout {place}": keys.dropout()}
        tags[f"tag {place}"] = bytes.fromhex(keys.tag(name, digest))
        keys.ratchet()
    secret["last secret"] = bytes.fromhex(str(keys.state()["secret"]))
    assert not occurrences(folder, secret | derived)
    # The keys are the run's own: the tags that go with them are in its ledger, every one, in their order.
    assert {what for what, _ in occurrences(folder, tags)} == tags.keys()
    assert [entry.tag for entry in read_ledger(folder).entries] == [tag.hex() for tag in tags.values()]


def test_who_knows_the_seed_subtracts_the_noise(data, tmp_path):
    """The statement of a seeded run says so. Everybody's coin is known from the folder, the seed and the others' data."""
    people, items = load(data).train("validation"), len(load(data).catalogue)
    recipe = make_recipe("popularity", epsilon=1.0, seed=SEED)
    grid = grid_step(1.0, items + 1)
    query, everybody = Histogram(items), Sample(np.arange(len(people)), b"")
    target = np.array([11])
    sums = {
        name: query.sum(who, everybody, grid)[query.name]
        for name, who in (("in", people), ("out", emptied(people, target)))
    }
    for truth in ("in", "out"):
        who = people if truth == "in" else emptied(people, target)
        folder = release(tmp_path / truth, data, recipe, lambda _, *rest, who=who: Curator(who, *rest))
        statement = json.loads((folder / "privacy.json").read_text())
        assert "can be subtracted" in statement["insecure"][0]
        scores = load_file(folder / "model.safetensors")["counts"]
        std = float(np.nextafter(statement["releases"][0]["noise_multiplier"] / grid, np.inf))
        name = statement["releases"][0]["name"]
        exact = {}
        for guess, total in sums.items():
            key = Keys(SEED).noise(name, framed_digest({name: total}, grid, std))
            noise = rounded_gaussian(key, total.shape, std)
            exact[guess] = np.abs(scores[1:] - (noise * grid)[1:] - (total * grid)[1:]).max()
        other = "out" if truth == "in" else "in"
        # float32 scores: exact but for their own rounding.
        assert exact[truth] < 1e-4 < 1 < exact[other]
