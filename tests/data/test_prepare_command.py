"""`dpformer prepare` and `dpformer demo`, as they are typed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpformer.data import load

LOG = "userId,movieId,rating,timestamp\n" + "".join(
    f"{user},{item},4,{1_589_716_800 + 10 * item}\n" for user in range(4) for item in range(user, 4)
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_prepare_talks_to_people(log: Path, tmp_path: Path, dpformer: Callable):
    done = dpformer("prepare", log, "-o", tmp_path / "out", "--min-events", 2, "--filter", "iterative")
    assert done.code == 0, done
    assert "user = userId, item = movieId, timestamp = timestamp; times as seconds, 2020-05-17 12:00:00" in done.err
    assert "found 4 users, 4 items, 10 events" in done.err
    assert "removed 1 users, 1 items, 2 events (at least 2 events, iterative)" in done.err
    assert "users are left out of evaluation" in done.err
    assert "density" in done.out
    assert "long-tail.svg" in done.err
    assert load(tmp_path / "out").manifest["counts"]["events"] == 8


def test_prepare_talks_to_machines(log: Path, tmp_path: Path, dpformer: Callable):
    done = dpformer("prepare", log, "-o", tmp_path / "out", "--json", "--dedupe")
    figures = json.loads(done.out)
    assert (figures["users"], figures["items"], figures["events"]) == (4, 4, 10)
    assert figures["manifest"]["counts"]["duplicates"] == 0
    assert figures["length"]["longest"] == 4
    assert 0 < figures["tail"]["events_of_top_tenth"] <= 1


def test_a_public_catalogue_and_own_events(log: Path, tmp_path: Path, dpformer: Callable):
    items = tmp_path / "items.csv"
    items.write_text("movieId,title,year\n0,Zero,1990\n3,Three,1993\n2,Two,1992\n9,Nine,1999\n")
    done = dpformer("prepare", log, "-o", tmp_path / "out", "--catalogue", items, "--min-user-events", 2)
    assert done.code == 0, done
    assert f"catalogue of 4 items from {items} (CSV): item = movieId, title = title" in done.err
    assert f"dropped 2 events of items that are not in the catalogue {items}" in done.err
    assert "1 users with fewer than 2 events stay without events (1 dropped)" in done.err
    assert "1 of 4 users have no events left; they still count as users" in done.err
    dataset = load(tmp_path / "out")
    assert dataset.names() == ["", "Zero", "Two", "Three", "Nine"]
    assert dataset.sequences.lengths.tolist() == [3, 2, 2, 0]


def test_a_filter_over_people_is_said_to_be_outside_of_the_guarantee(log: Path, tmp_path: Path, dpformer: Callable):
    done = dpformer("prepare", log, "-o", tmp_path / "out", "--min-events", 2)
    assert "outside of the guarantee: items and users were filtered by --min-events 2" in done.err
    done = dpformer("prepare", log, "-o", tmp_path / "other", "--min-user-events", 2)
    assert "outside" not in done.err
    refused = dpformer("prepare", log, "-o", tmp_path / "x", "--catalogue", "private", "--min-events", 2)
    assert refused.code == 2
    assert "--min-user-events N" in refused.err


def test_files_called_log_and_private(log: Path, tmp_path: Path, dpformer: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("log", "private"):
        Path(name).write_text("item_id\n2\n3\n")
        for given_name, mode in ((name, name), (f"./{name}", "public")):
            output = f"{name}-{mode}"
            assert dpformer("prepare", log, "-o", output, "--catalogue", given_name).code == 0
            assert load(output).catalogue_mode == mode


def test_prepare_twice(log: Path, tmp_path: Path, dpformer: Callable):
    assert dpformer("prepare", log, "-o", tmp_path / "out").code == 0
    again = dpformer("prepare", log, "-o", tmp_path / "out")
    assert again.code == 2
    assert "--force" in again.err
    assert dpformer("prepare", log, "-o", tmp_path / "out", "--force").code == 0


def test_a_named_set_and_a_file_of_that_name(tmp_path: Path, dpformer: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text(LOG)
    assert "reader" in str(load_users(dpformer, "demo", "a"))
    assert load_users(dpformer, "./demo", "b") == [0, 1, 2, 3]


def load_users(dpformer: Callable, log: str, output: str) -> list[object]:
    assert dpformer("prepare", log, "-o", output).code == 0
    return load(output).sequences.users.to_list()


def test_demo(tmp_path: Path, dpformer: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = dpformer("demo")
    assert done.code == 0, done
    assert "The Harbour" in done.out
    assert "differential privacy" in done.out
    assert "clipping*" in done.out
    assert "* computed on people's data without noise, to look at: not private" in done.out
    assert "Not evaluated" not in Path("demo-output/report.html").read_text()
    assert len(load("demo-output/data").sequences) == 3000
    figures = json.loads(dpformer("demo", "--epsilon", "4", "--json").out)
    assert list(figures["test"]) == ["default", "dpformer", "transitions", "popularity, not private"]
    assert figures["privacy"]["epsilon"] <= 4
    did = figures["did"]
    assert did["transitions"].keys() == {"releases", "epsilon"}
    assert did["default"].keys() == did["dpformer"].keys()
    assert [did[name]["releases"] for name in figures["test"] if name in did] == [4, 1, 4]
    steps = did["dpformer"]
    assert (steps["steps"], steps["users_per_step"], steps["clipped_to"]) == (80, 750, 1.0)
    assert 3.5 < steps["epsilon"] <= 4
    assert steps["norms_not_private"] == sorted(steps["norms_not_private"])
    assert steps["norms_not_private"][0] > 0
    assert not steps["reattention"]
    assert 0 < steps["attention_shift_not_private"] < 0.5
    assert min(steps["seconds_per_step"], steps["seconds_per_step_of_plain_pytorch"]) > 0


def test_preparing_needs_no_torch(log: Path, tmp_path: Path):
    code = (
        "import sys; from dpformer import prepare; from dpformer.data import save;"
        f"save(prepare({str(log)!r}), {str(tmp_path / 'out')!r}); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_interrupted_command_leaves_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpformer: Callable
):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpformer.data.store.draw_long_tail", interrupt)
    assert dpformer("prepare", log, "-o", tmp_path / "out").code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
