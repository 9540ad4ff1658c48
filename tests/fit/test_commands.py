"""fit, resume, evaluate, recommend and show, as people type them; and the folder that they leave."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpformer import load_model
from dpformer.artifact.read import column_hashes
from dpformer.data import load
from dpformer.errors import DPFormerError
from dpformer.fit.run import start
from dpformer.privacy import parse_statement, read_ledger
from tests.fit.conftest import ITEMS, USERS, small_log
from tests.recipes import small_recipe

SMALL = [
    *("--preset", "pure", "--epsilon", "20", "--delta", "1e-3", "--seed", "1"),
    *("--set", "d=8", "--set", "max-length=6", "--set", "epochs=2.5"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert start(folder, data, small_recipe()).train()
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def assert_one_line(done, *texts: str) -> None:
    assert done.code == 2, done
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err


def strict_json(text: str):
    """JSON as others read it: no NaN, no Infinity."""

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


# The run folder


def test_the_folder_holds_what_it_should_and_nobody(finished, data):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        *("config.json", "model.json", "model.safetensors", "items.jsonl", "privacy.json", "events.jsonl", "README.md"),
        *("ledger.jsonl", "ledger.head", "ledger.lock", "local.json", "files.json", "run.lock", "answers"),
    }
    for name in ("local.json", "events.jsonl"):
        assert (finished / name).stat().st_mode & 0o777 == 0o600, name
    assert set(json.loads((finished / "local.json").read_text())) == {"data"}, (
        "a hash would confirm a guess of the data"
    )
    users = load(data).sequences.users.to_list()
    assert len(users) == USERS
    for path in (path for path in finished.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(user.encode() in content for user in [*users, "x7Qz"]), path
        if path.name not in ("config.json", "README.md"):  # they name the columns of the log
            assert b"timestamp" not in content
        assert not content.startswith(b"\x80")  # pickle
        assert not content.startswith(b"PK")  # zip, torch.save
    # Items in the order of the catalogue, without counts.
    assert pl.read_ndjson(finished / "items.jsonl").columns == ["item", "item_id", "title"]
    for line in (finished / "events.jsonl").read_text().splitlines():
        assert json.loads(line)["not_private"] == ["loss"]


def test_a_model_loads_in_a_fresh_process_without_the_data(copy, tmp_path):
    expected = load_model(copy).recommend([["i03", "Heat"], []], k=4)
    program = (
        "import sys, dpformer\n"
        "found = dpformer.load_model('run')\n"
        "assert found.statement.steps.charged == 10\n"
        "found.recommend([['i03', 'Heat'], []], k=4).write_json('out.json')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    got = pl.read_json(tmp_path / "out.json")
    assert got["item_id"].to_list() == expected["item_id"].to_list()


def test_the_card_says_what_the_statement_says(finished, tmp_path, data):
    card = (finished / "README.md").read_text()
    assert parse_statement((finished / "privacy.json").read_bytes()).text() in card
    assert "INSECURE" in card  # seeded
    folder = tmp_path / "inf"
    assert start(folder, data, small_recipe(epsilon=float("inf"))).train()
    statement = parse_statement((folder / "privacy.json").read_bytes())
    assert not statement.private
    assert statement.epsilon == "inf"
    assert "NOT PRIVATE" in (folder / "README.md").read_text()
    assert not (folder / "ledger.jsonl").exists()
    assert load_model(folder).model.popularity() is not None


DAMAGE = {
    "config.json": [b"{", b"[]", b'{"format": "dpformer-run"}', b'{"format": "dpformer-run", "recipe": {"d": -1}}'],
    "model.json": [b"{", b"[]", b"{}", b'{"kind": "transformer"}'],
    "model.safetensors": [b"", b"\x00" * 64],
    "items.jsonl": [b"", b"PAR1"],
    "privacy.json": [b"{}", b"\xff"],
    "ledger.jsonl": [b'{"plan": 1}\n'],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, cs in DAMAGE.items() for c in cs])
def test_damage_is_one_line(name, content, copy, dpformer):
    (copy / name).write_bytes(content)
    command = ["show", copy] if name == "ledger.jsonl" else ["recommend", copy, "--history", "i03"]
    assert_one_line(dpformer(*command))


@pytest.mark.parametrize("name", ["config.json", "model.json", "items.jsonl", "privacy.json", "model.safetensors"])
def test_a_missing_file_is_one_line(name, copy, dpformer):
    (copy / name).unlink()
    assert_one_line(dpformer("recommend", copy, "--history", "i03"), name if name != "model.safetensors" else "resume")
    if name in ("config.json", "model.json", "privacy.json"):
        assert_one_line(dpformer("show", copy), name)


def test_another_size_than_the_catalogue_is_refused(copy, dpformer):
    items = pl.read_ndjson(copy / "items.jsonl")
    items.head(5).write_ndjson(copy / "items.jsonl")
    assert_one_line(dpformer("recommend", copy, "--history", "i03"), "does not fit model.json")
    items.with_columns(item_id=pl.col("item_id") + "x").write_ndjson(copy / "items.jsonl")
    assert_one_line(dpformer("recommend", copy, "--history", "i03"), "was changed")
    items.head(5).write_ndjson(copy / "items.jsonl")
    known = json.loads((copy / "files.json").read_text())
    (copy / "files.json").write_text(json.dumps(known | {"items.jsonl": column_hashes(items.head(5))}))
    assert_one_line(dpformer("recommend", copy, "--history", "i03"), "does not fit model.json")


# fit, resume, show


def test_fit_show_and_evaluate(tmp_path, data, dpformer):
    run = tmp_path / "run"
    done = dpformer("fit", data, "--run", run, *SMALL, "--json")
    assert done.code == 0
    result = strict_json(done.out)
    assert result["steps"] == result["privacy"]["steps"]["charged"] == 10
    assert "step 10/10" in done.err
    assert "loss" in done.err
    assert "(not private)" in done.err
    # The command line and the library do the same.
    library = tmp_path / "library"
    assert start(library, data, small_recipe("pure", d=8, max_length=6, epochs=2.5)).train()
    assert (run / "model.safetensors").read_bytes() == (library / "model.safetensors").read_bytes()
    shown = strict_json(dpformer("show", run, "--json").out)
    assert shown["finished"]
    assert shown["steps"] == {"charged": 10, "planned": 10}
    assert shown["spent"]["epsilon"] == result["privacy"]["epsilon"]
    assert "differential privacy" in dpformer("show", run).out
    figures = strict_json(dpformer("evaluate", run, "--data", data, "--json").out)
    assert 0 < figures["masked"]["ndcg@10"]["value"] <= 1
    assert "all 20 items ranked for all 55 users" in figures["protocol"]
    assert dpformer("evaluate", run, "--item", "validation").code == 0
    (run / "local.json").unlink()
    assert_one_line(dpformer("evaluate", run), "does not record where its data is")
    metrics = strict_json((run / "metrics.json").read_text())
    assert metrics["not_private"] is True
    assert set(metrics) == {"not_private", "test", "validation"}
    assert_one_line(dpformer("resume", run), "is finished")
    assert_one_line(dpformer("fit", data, "--run", run, *SMALL), "exists already")


def test_without_privacy_everything_says_so(tmp_path, data, dpformer):
    run = tmp_path / "run"
    done = dpformer(
        "fit",
        data,
        "--run",
        run,
        "--preset",
        "pure",
        "--epsilon",
        "inf",
        "--set",
        "epochs=2",
        "--set",
        "d=8",
        "--quiet",
    )
    assert done.out.startswith("NOT PRIVATE")
    assert "step" not in done.err
    shown = strict_json(dpformer("show", run, "--json").out)
    assert shown["recipe"]["epsilon"] == "inf"
    assert not shown["privacy"]["private"]


def test_wrong_arguments_are_one_line(tmp_path, data, dpformer, finished):
    run = tmp_path / "run"
    assert_one_line(dpformer("fit", tmp_path, "--run", run), "holds no prepared data")
    assert_one_line(dpformer("fit", data, "--run", run, "--preset", "papr"), "no preset")
    assert_one_line(dpformer("fit", data, "--run", run, "--set", "d"), "is not name=value")
    assert_one_line(dpformer("fit", data, "--run", run, "--set", "noise=crypto"), "unknown setting 'noise'")
    assert_one_line(dpformer("fit", data, "--run", run, "--config", tmp_path / "none"), "cannot be read")
    assert not run.exists()
    (tmp_path / "file").write_text("")
    assert_one_line(dpformer("fit", data, "--run", tmp_path / "file"), "exists already")
    assert_one_line(dpformer("fit", data, "--run", tmp_path / "file" / "run", *SMALL), "cannot be written")
    assert_one_line(dpformer("resume", tmp_path), "config.json: is missing")
    assert_one_line(dpformer("show", tmp_path / "nowhere"), "config.json: is missing")
    assert_one_line(dpformer("evaluate", finished, "--data", data, "--item", "first"), "validation")


def test_evaluate_wants_the_catalogue_of_the_model(tmp_path, dpformer, copy):
    from dpformer.data import prepare, save

    save(prepare(small_log().with_columns(item_id="other " + pl.col("item_id"))), tmp_path / "other")
    assert_one_line(dpformer("evaluate", copy, "--data", tmp_path / "other"), "has no item in common with the model")
    save(prepare(small_log().with_columns(item_id=pl.col("item_id").replace("i03", "new"))), tmp_path / "some")
    done = dpformer("evaluate", copy, "--data", tmp_path / "some")
    assert done.code == 0
    assert "1 of 20 items of" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_safely_and_resume_goes_on(number, tmp_path, data):
    run = tmp_path / "run"
    tool = [sys.executable, "-m", "dpformer"]
    settings = ["--preset", "pure", "--set", "epochs=300", "--set", "d=8", "--delta", "1e-3", "--quiet"]
    child = subprocess.Popen([*tool, "fit", data, "--run", run, *settings], stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: (run / "events.jsonl").exists() and (run / "events.jsonl").read_text().count("\n") > 3, child)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"go on with: dpformer resume {run}" in err
    assert "Traceback" not in err
    state = json.loads(next((run / "private").rglob("state.json")).read_text())
    assert state["step"] == read_ledger(run).steps_charged == len((run / "events.jsonl").read_text().splitlines())
    if number == signal.SIGTERM:
        return
    again = subprocess.Popen([*tool, "resume", run, "--quiet"], stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: (run / "events.jsonl").read_text().count("\n") > state["step"] + 3, again)
    again.kill()
    again.communicate()
    assert read_ledger(run).steps_charged > state["step"]


def _wait_for(ready, child: subprocess.Popen) -> None:
    for _ in range(3000):
        if ready():
            return
        assert child.poll() is None, child.stderr.read() if child.stderr else ""
        time.sleep(0.02)
    pytest.fail("nothing happened in a minute")


def test_a_second_ctrl_c_stops_at_once(tmp_path, data, dpformer, monkeypatch):
    """Two signals during the same step: the process ends there, and the last checkpoint counts."""
    from dpformer.fit.dpsgd import Trainer

    real = Trainer.make_step

    def step(self, asker):
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, asker)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "make_step", step)
        done = dpformer("fit", data, "--run", tmp_path / "run", *SMALL)
    assert done.code == 130
    assert "go on from the last checkpoint with: dpformer resume" in done.err
    assert dpformer("resume", tmp_path / "run", "--quiet").code == 0
    assert read_ledger(tmp_path / "run").steps_charged == 10


# recommend


def test_recommend_by_history(finished, dpformer):
    done = dpformer(
        "recommend", finished, "--history", "Good, the Bad, the Ugly, Toy,Story ,Heat, i05, nonsense", "--json"
    )
    assert done.code == 0
    assert done.err == "not in the catalogue, skipped: nonsense\n"
    rows = strict_json(done.out)
    assert [row["rank"] for row in rows] == list(range(1, 11))
    assert not {"i00", "i01", "i02", "i05"} & {row["item_id"] for row in rows}  # seen
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    model = load_model(finished)
    expected = model.recommend([["i00", "i01", "i02", "i05"]], k=10)
    assert expected["item_id"].to_list() == [row["item_id"] for row in rows]
    assert "Heat" in dpformer("recommend", finished, "--history", "i05", "--seen", "-k", "20").out


def test_the_ranking_is_that_of_the_model(finished):
    """Exact top-k, against a full sort of the scores of each history alone."""
    import torch

    model = load_model(finished)
    histories = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
    best, values = model.rank(histories, k=6)
    for history, got, value in zip(histories, best, values, strict=True):
        used = torch.tensor([history[-6:]])
        with torch.no_grad():
            scores = model.model.scores(used, torch.tensor([used.shape[1]]))[0]
        order = [int(n) for n in scores.argsort(descending=True) if int(n) not in history and int(n) > 0][:6]
        assert got.tolist() == order
        assert value.tolist() == pytest.approx(scores[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("model", ["transformer", "gru"])
def test_a_model_with_a_vocabulary_ranks_all_items(model, tmp_path, data):
    """Items outside the vocabulary are ranked by the released histogram, and so is everything for who has none in it."""
    from dpformer.fit.run import start

    recipe = small_recipe(model=model, vocabulary=4, epochs=1.0)
    assert start(tmp_path / "run", data, recipe).train()
    released = load_model(tmp_path / "run")
    popularity = released.model.popularity().numpy()
    order = (1 + np.argsort(-popularity[1:], kind="stable")).tolist()
    unknown, known = order[4:], order[:4]
    best, _ = released.rank([unknown[:1], known[:1] * 9 + unknown[:2], []], k=ITEMS, seen=True)
    assert all(sorted(row.tolist()) == list(range(1, ITEMS + 1)) for row in best)
    for row in (best[0], best[2]):  # by popularity; items at its floor are equal
        assert (np.diff(popularity[row]) <= 0).all()
    rest = [n for n in best[1].tolist() if n in unknown]
    assert (np.diff(popularity[rest]) <= 0).all()


def test_more_items_than_there_are_and_none_left(finished, dpformer):
    everything = ",".join(f"i{n:02d}" for n in range(ITEMS))
    rows = strict_json(dpformer("recommend", finished, "--history", "i03", "-k", "1000", "--json").out)
    assert len(rows) == ITEMS - 1
    rows = strict_json(dpformer("recommend", finished, "--history", "i03", "-k", "1000", "--seen", "--json").out)
    assert len(rows) == ITEMS
    assert strict_json(dpformer("recommend", finished, "--history", everything, "--json").out) == []
    assert_one_line(dpformer("recommend", finished, "--history", "i03", "-k", "0"), "not at least 1")


def test_a_cold_start_is_ranked_by_the_released_popularity(finished, dpformer, data, tmp_path):
    done = dpformer("recommend", finished, "--history", "nobody knows", "-k", "20", "--json")
    assert "ranked by the released popularity" in done.err
    popularity = load_model(finished).model.popularity()
    got = [int(row["item_id"][1:]) + 1 for row in strict_json(done.out)]
    assert popularity[got].tolist() == sorted(popularity[1:].tolist(), reverse=True)
    assert len(popularity[1:].unique()) > 3
    folder = tmp_path / "none"
    assert start(folder, data, small_recipe(histogram=False, epochs=1.0)).train()
    done = dpformer("recommend", folder, "--history", "nobody knows", "-k", "3", "--json")
    assert "by the order of the catalogue" in done.err
    assert [row["item_id"] for row in strict_json(done.out)] == ["i00", "i01", "i02"]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_recommend_from_file_to_file(suffix, finished, dpformer, tmp_path, data, monkeypatch):
    log = small_log().with_columns(
        pl.when(pl.col("user_id").str.contains("0003")).then(pl.lit("i99")).otherwise("item_id").alias("item_id")
    )
    source, target = tmp_path / f"log.{suffix}", tmp_path / f"out.{suffix}"
    {"csv": log.write_csv, "parquet": log.write_parquet, "jsonl": log.write_ndjson}[suffix](source)
    monkeypatch.setattr("dpformer.cli.recommend._ROWS", 7)  # several parts
    done = dpformer("recommend", finished, "--file", source, "-k", "3", "-o", target)
    assert done.code == 0
    assert "not in the catalogue, skipped: 1 (i99)" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name]), (
        "nothing is left aside"
    )
    read = {"csv": pl.read_csv, "parquet": pl.read_parquet, "jsonl": pl.read_ndjson}[suffix](target)
    assert read.columns == ["user_id", "rank", "item_id", "title", "score"]
    assert read.group_by("user_id").len()["len"].to_list() == [3] * USERS
    seen = log.join(read, on=["user_id", "item_id"], how="inner")
    assert seen.is_empty()
    one = "person-0007-x7Qz"
    history = log.filter(pl.col("user_id") == one).sort("timestamp")["item_id"].to_list()
    expected = load_model(finished).recommend([history], k=3)["item_id"].to_list()
    assert read.filter(pl.col("user_id") == one)["item_id"].to_list() == expected
    rows = strict_json(dpformer("recommend", finished, "--file", source, "--users", one, "-k", "3", "--json").out)
    assert [row["item_id"] for row in rows] == expected


def test_wrong_requests_are_one_line(finished, dpformer, data, tmp_path):
    assert_one_line(dpformer("recommend", finished, "--file", data, "--users", "nobody"), "has no user 'nobody'")
    assert_one_line(dpformer("recommend", finished), "either --history or --all")
    assert_one_line(dpformer("recommend", finished, "--history", "i03", "--file", data), "either --history or --all")
    assert_one_line(dpformer("recommend", finished, "--history", "i03", "--users", "x"), "--all")
    assert_one_line(dpformer("recommend", finished, "--history", "i03", "-o", "x.xlsx"), ".csv, .parquet or .jsonl")
    for suffix in ("csv", "parquet", "jsonl"):
        target = tmp_path / "nowhere" / f"x.{suffix}"
        assert_one_line(dpformer("recommend", finished, "--history", "i03", "-o", target), "cannot be written")
    assert_one_line(dpformer("recommend", tmp_path, "--history", "i03"), "is this a run folder?")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_full_disk_is_one_line(finished, dpformer, data, tmp_path, suffix):
    """Files may not grow beyond 1,000 bytes here: polars has another error for each format."""
    before, target = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / f"x.{suffix}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        done = dpformer("recommend", finished, "--all", data, "-o", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_one_line(done, "space left")
    assert str(target) in done.err
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_has_no_model(tmp_path, data, dpformer):
    run = tmp_path / "run"
    start(run, data, small_recipe()).close()
    with pytest.raises(DPFormerError, match=r"holds secret state .* and no released model yet, so it is not opened"):
        load_model(run)
    assert_one_line(dpformer("show", run), f"finish it with: dpformer resume {run}")
