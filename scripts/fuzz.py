"""Bad input for everything that reads: thousands of files that no sane program wrote.

    python scripts/fuzz.py --examples 2000 [--only readers] [--seed 0] [--json]      by hypothesis
    python scripts/fuzz.py --atheris 60 [--only ledger]                              by coverage, 60 s a target

Whatever comes in, the answer is a result or a `DPFormerError` of one line. Anything else (another exception, a panic of a
library) is a finding, printed with the input; exit code 1. Atheris is taken where it is installed.
"""

import argparse
import gzip
import importlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

if "--inside" in sys.argv:  # atheris counts coverage in what is imported under it
    import atheris

    with atheris.instrument_imports(include=["dpformer"]):
        for part in ("artifact", "fit.presets", "data.read", "data.read.json_lines", "privacy.ledger"):
            importlib.import_module(f"dpformer.{part}")

import polars as pl
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dpformer import load_model
from dpformer.artifact.read import column_hashes
from dpformer.data import held_out, load, prepare, save
from dpformer.errors import DPFormerError
from dpformer.files import sha256
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start
from dpformer.privacy import parse_statement, read_ledger

WORK = Path(tempfile.mkdtemp(prefix="dpformer-fuzz-"))
USERS = [f"u{n}" for n in range(6)]
EVENTS = [(user, f"i{(3 * n + k) % 7}", 1_500_000_000 + k) for n, user in enumerate(USERS) for k in range(2 + n)]
NASTY = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n\n", b'"', b"'", b"::", b"\t", b",", b";", b"|", b"{", b"[", b"}"),
    *(
        b"nan",
        b"-inf",
        b"1e400",
        b"null",
        b"9" * 30,
        b"-1",
        b"\xe2\x80\xa8",
        b"PAR1",
        b"\x1f\x8b",
        b"user_id",
        b"item_id",
    ),
    *(b"[" * 2000, b'{"a":' * 2000, b"__import__('os')", b"0x10", b"true", b"1970-01-01", b"99999-01-01", b" " * 50),
)


def valid_logs() -> dict[str, bytes]:
    """One log in every form that is read."""
    frame = pl.DataFrame(EVENTS, schema=["user_id", "item_id", "timestamp"], orient="row")
    parquet = io.BytesIO()
    frame.write_parquet(parquet)
    rows = [[str(cell) for cell in event] for event in EVENTS]
    records = [dict(zip(("reviewerID", "asin", "unixReviewTime"), event, strict=True)) for event in EVENTS]
    logs = {
        "csv": "user_id,item_id,timestamp\n" + "\n".join(",".join(row) for row in rows),
        "quoted csv": "user,item,time\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows),
        "tsv": "userId\titemId\tts\n" + "\n".join("\t".join(row) for row in rows),
        "semicolons": "user;item;date\n" + "\n".join(f"{u};{i};2020-01-01" for u, i, _ in rows),
        "ratings.dat": "\n".join(f"{u[1:]}::{i[1:]}::5::{t}" for u, i, t in rows),
        "inter": "user_id:token\titem_id:token\ttimestamp:float\n" + "\n".join("\t".join(row) for row in rows),
        "sasrec": "\n".join(f"{u[1:]} {i[1:]}" for u, i, _ in rows),
        "amazon": "\n".join(f"{u},{i},5.0,{t}" for u, i, t in rows),
        "json lines": "\n".join(json.dumps(record) for record in records),
        "python literals": "\n".join(repr(record) for record in records),
    }
    encoded = {name: (text + "\n").encode() for name, text in logs.items()}
    return {**encoded, "gzip": gzip.compress(encoded["csv"]), "parquet": parquet.getvalue()}


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Something valid with a few things done to it."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.integers(0, 5))
        if what == 0 and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif what == 1:
            data[place:place] = draw(st.sampled_from(NASTY))
        elif what == 2:
            del data[place : place + draw(st.integers(1, 40))]
        elif what == 3:
            data[place:place] = data[place : place + draw(st.integers(1, 200))]
        elif what == 4:
            del data[place:]
        else:
            data[place : place + 4] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


CELLS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", " ", "7", "007", "7.0", "nan", "1e3", "1500000000", "2020-05-17T12:00:00Z", '"', '"a', "a::b", "\ufeff"]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
)


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """A table of odd cells under odd names, cut in some way."""
    names = st.sampled_from(
        ["user_id", "item_id", "timestamp", "title", "rating", "User ID", "", "x", "user", "session"]
    )
    head = draw(st.lists(st.one_of(names, CELLS), min_size=1, max_size=5))
    rows = [head, *draw(st.lists(st.lists(CELLS, min_size=1, max_size=6), max_size=8))]
    cut, end = draw(st.sampled_from([",", "\t", ";", "|", " ", "::"])), draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
    return end.join(cut.join(row) for row in rows).encode("utf-8", "surrogatepass")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def json_lines(draw: st.DrawFn) -> bytes:
    """Objects with some of the names that are looked for."""
    keys = st.sampled_from(["user_id", "item_id", "timestamp", "title", "x"])
    form = draw(st.sampled_from([json.dumps, repr]))
    lines = draw(st.lists(st.one_of(st.dictionaries(keys, JSON, max_size=5), JSON), min_size=1, max_size=6))
    return "\n".join(form(line) for line in lines).encode("utf-8", "surrogatepass")


@st.composite
def parquets(draw: st.DrawFn) -> bytes:
    """Sound Parquet files of types that no log has."""
    kinds = [
        (pl.Int8, st.integers(-128, 127)),
        (pl.Float32, st.floats(width=32)),
        (pl.String, st.text(max_size=4)),
        (pl.Binary, st.binary(max_size=4)),
        (pl.Boolean, st.booleans()),
        (pl.List(pl.Int64), st.lists(st.integers(0, 5), max_size=2)),
        (pl.Struct({"a": pl.Int64}), st.fixed_dictionaries({"a": st.integers(0, 5)})),
        (pl.Date, st.dates()),
        (pl.Datetime("us"), st.datetimes()),
        (pl.Time, st.times()),
        (pl.Duration("us"), st.timedeltas(timedelta(days=-9999), timedelta(days=9999))),
        (pl.Null, st.none()),
        (pl.Categorical, st.text(max_size=3)),
        (pl.UInt64, st.integers(0, 2**64 - 1)),
    ]
    rows = draw(st.integers(0, 5))
    columns = {}
    for name in draw(st.lists(st.sampled_from(["user_id", "item_id", "timestamp", "title", "x"]), unique=True)):
        kind, values = draw(st.sampled_from(kinds))
        cells = draw(st.lists(st.one_of(st.none(), values), min_size=rows, max_size=rows))
        columns[name] = pl.Series(name, cells, dtype=kind)
    out = io.BytesIO()
    pl.DataFrame(columns).write_parquet(out)
    return out.getvalue()


def read_log(data: bytes) -> None:
    """The readers, told apart by content; a name ending in .parquet must not matter to them."""
    path = WORK / "log"
    path.write_bytes(data)
    save(prepare(path), WORK / "prepared", force=True)
    load(WORK / "prepared")


def read_frame(data: bytes) -> None:
    """A frame in memory."""
    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except BaseException:  # noqa: BLE001  not ours to read
        return
    prepare(frame)


def read_config(data: bytes) -> None:
    """A TOML file of settings."""
    path = WORK / "config.toml"
    path.write_bytes(data)
    make_recipe(file=path).model_dump_json()


def read_statement(data: bytes) -> None:
    """A privacy statement."""
    parse_statement(data).text()


def read_chain(data: bytes) -> None:
    """A ledger, with the head of the sound one or none."""
    folder = WORK / "ledger"
    folder.mkdir(exist_ok=True)
    shutil.copy(released() / "ledger.head", folder)
    (folder / "ledger.jsonl").write_bytes(data)
    read_ledger(folder)


@cache
def released() -> Path:
    """A small released folder."""
    frame = pl.DataFrame(EVENTS, schema=["user_id", "item_id", "timestamp"], orient="row")
    save(prepare(frame), WORK / "data")
    recipe = make_recipe("dpformer", epsilon=20, delta=0.01, d=4, max_length=4, epochs=2)
    run = start(WORK / "run", WORK / "data", recipe)
    run.train()
    return WORK / "run"


RELEASED = ("config.json", "model.json", "items.jsonl", "privacy.json", "model.safetensors")


def read_released(name: str, data: bytes) -> None:
    """A stranger's folder: one file is replaced, and its hash is made to fit."""
    folder = WORK / "strange"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(released(), folder)
    (folder / name).write_bytes(data)
    if name != "files.json":
        hashes = json.loads((folder / "files.json").read_text())
        hashes |= {n: sha256(folder / n) for n in RELEASED if n != "items.jsonl"}
        if name == "items.jsonl":
            hashes[name] = {"item_id": column_hash(folder / name)}
        (folder / "files.json").write_text(json.dumps(hashes))
    model = load_model(folder)
    model.recommend([["i1", "i2"], []], k=3)


def column_hash(path: Path) -> str:
    """The hash of the ids, where there are any."""
    try:
        return column_hashes(pl.read_ndjson(path))["item_id"]
    except BaseException:  # noqa: BLE001  then it will be refused for that
        return ""


def read_prepared(name: str, data: bytes) -> None:
    """A stranger's prepared folder, its hashes made to fit."""
    released()
    folder = WORK / "strange-data"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WORK / "data", folder)
    (folder / name).write_bytes(data)
    if name.endswith(".parquet"):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = sha256(folder / name)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    held_out(load(folder).sequences)


@st.composite
def specs(draw: st.DrawFn) -> bytes:
    """A model.json with other values."""
    spec = json.loads((released() / "model.json").read_text())
    odd = st.one_of(JSON, st.sampled_from([10**9, 10**30, -1, 0, 1e308, "transformer", "gru", "popularity", 16384]))
    spec |= draw(st.dictionaries(st.sampled_from(sorted(spec)), odd, min_size=1, max_size=3))
    return json.dumps(spec).encode()


@st.composite
def models(draw: st.DrawFn) -> bytes:
    """Sound safetensors of odd tensors."""
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save as to_bytes

    tensors = load_file(released() / "model.safetensors")
    for name in draw(st.lists(st.sampled_from([*sorted(tensors), "x"]), min_size=1, max_size=2)):
        if draw(st.booleans()):
            tensors.pop(name, None)
        else:
            shape = draw(st.lists(st.integers(0, 9), max_size=3))
            kind = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]))
            value = draw(st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -1.0, 1e38]))
            whole = value if kind.is_floating_point or value in (0.0, 1.0, -1.0) else 0
            tensors[name] = torch.full(shape, whole, dtype=kind)
    return to_bytes(tensors)


def ask(history: Any) -> None:
    """Whatever is given as a history gets an answer of known items, best first."""
    model = load_once()
    answer = model.recommend([history], k=3)
    assert answer["score"].is_sorted(descending=True)
    assert set(answer["item_id"]) <= set(model.catalogue["item_id"])


@cache
def load_once() -> Any:
    return load_model(released())


HISTORIES = st.lists(
    st.one_of(
        st.text(), st.integers(), st.floats(), st.none(), st.binary(max_size=4), st.sampled_from(["i1", "i2", "i3"])
    ),
    max_size=40,
)


def targets() -> dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any], list[bytes]]]:
    """Name to what is tested, what hypothesis gives it, and valid inputs to begin from (for atheris)."""
    logs = list(valid_logs().values())
    toml = [
        b'epsilon = 3.0\nmodel = "gru"\nrecency = "none"\n[network]\nd = 16\n',
        b'tuning = {kind = "listed", configurations = ["a", "b"]}\nreattention = "off"\ndpsgd.epochs = 3\n',
        b'[[stages]]\nstage = "histogram"\nshare = 0.1\n[[stages]]\nstage = "transitions"\nshare = 0.9\n'
        b'[[stages]]\nstage = "distil"\n',
    ]
    folder = released()
    whole = {name: (folder / name).read_bytes() for name in (*RELEASED, "ledger.jsonl", "files.json")}
    data = {
        name: (WORK / "data" / name).read_bytes() for name in ("manifest.json", "sequences.parquet", "items.parquet")
    }
    targets: dict[str, Any] = {
        "readers": (
            read_log,
            st.one_of(mutated(logs), tables(), json_lines(), parquets(), st.binary(max_size=80)),
            logs,
        ),
        "frames": (read_frame, parquets(), logs[-1:]),
        "config file": (read_config, st.one_of(mutated(toml), st.binary(max_size=60)), toml),
        "statement": (read_statement, mutated([whole["privacy.json"]]), [whole["privacy.json"]]),
        "ledger": (read_chain, mutated([whole["ledger.jsonl"]]), [whole["ledger.jsonl"]]),
        "history": (ask, HISTORIES, []),
    }
    more = {"model.json": specs(), "model.safetensors": models(), "items.jsonl": json_lines()}
    for name in (*RELEASED, "files.json"):
        given_bytes = st.one_of(mutated([whole[name]]), *([more[name]] if name in more else []))
        targets[f"released {name}"] = (lambda b, n=name: read_released(n, b), given_bytes, [whole[name]])
    for name, content in data.items():
        wild = [parquets()] if name.endswith("parquet") else []
        targets[f"prepared {name}"] = (
            lambda b, n=name: read_prepared(n, b),
            st.one_of(mutated([content]), *wild),
            [content],
        )
    return targets


class Tally:
    """Counts what was tried; a result or an error of one line is survived, anything else is raised."""

    def __init__(self, target: Callable[[Any], None]) -> None:
        self.target, self.tried, self.refused = target, 0, 0

    def __call__(self, data: Any) -> None:
        """Try one input."""
        self.tried += 1
        try:
            self.target(data)
        except DPFormerError as error:
            self.refused += 1
            if not str(error).strip():
                raise AssertionError("an error without words") from error


def by_hypothesis(tally: Tally, strategy: st.SearchStrategy[Any], examples: int, number: int) -> str | None:
    """Try examples; gives the smallest that is not survived, with its exception."""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def test(data: Any) -> None:
        tally(data)

    try:
        test()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        errors = getattr(error, "exceptions", (error,))
        return " | ".join(
            f"{type(e).__name__}: {str(e)[:200]} {' '.join(getattr(e, '__notes__', []))[:400]}" for e in errors
        )
    return None


def by_atheris(name: str, seconds: int) -> None:
    """Coverage-guided, in this process; it does not return."""
    target, _, seeds = targets()[name]
    corpus = WORK / "corpus"
    corpus.mkdir()
    for number, content in enumerate(seeds):
        (corpus / str(number)).write_bytes(content)
    tally = Tally(target)
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-verbosity=0",
        "-print_final_stats=1",
        "-rss_limit_mb=6000",
    ]
    atheris.Setup([*arguments, f"-artifact_prefix={WORK}/"], tally)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--only", action="append")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--atheris", type=int, metavar="SECONDS")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        by_atheris(options.inside, options.atheris)
    number = random.randrange(2**32) if options.seed is None else options.seed
    report: dict[str, Any] = {}
    chosen = {name: part for name, part in targets().items() if not options.only or name in options.only}
    for name, (target, strategy, _) in chosen.items():
        began, tally = time.monotonic(), Tally(target)
        if options.atheris:
            if name == "history":
                continue
            command = [sys.executable, __file__, "--atheris", str(options.atheris), "--inside", name]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            runs = [line for line in done.stderr.splitlines() if line.startswith("stat::number_of_executed_units")]
            tally.tried = int(runs[-1].split()[1]) if runs else 0
            problem = done.stderr[-1500:] if done.returncode else None
        else:
            problem = by_hypothesis(tally, strategy, options.examples, number)
        report[name] = {"tried": tally.tried, "refused": tally.refused, "seconds": round(time.monotonic() - began, 1)}
        report[name]["problem"] = problem
        if options.atheris:
            del report[name]["refused"]  # counted in the child
        if not options.json:
            print(
                f"{name:26} tried {tally.tried:7}  refused {tally.refused:7}  {report[name]['seconds']:7.1f} s",
                flush=True,
            )
            if problem:
                print(f"    {problem}")
    if options.json:
        print(json.dumps({"seed": number, "targets": report}, indent=2))
    shutil.rmtree(WORK, ignore_errors=True)
    sys.exit(any(part["problem"] for part in report.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
