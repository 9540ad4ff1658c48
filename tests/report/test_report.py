"""`dpformer report`: what stands in the page, what does not, and that a browser shows it whole."""

import json
import re
import shlex
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

from dpformer import load_model
from dpformer.artifact.card import commands
from dpformer.cli.options import parse_settings
from dpformer.data import prepare, save
from dpformer.errors import DPFormerError
from dpformer.evaluation import evaluate, held_out
from dpformer.fit.presets import command, make_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import start
from dpformer.report import make_report
from tests.fit.conftest import small_log
from tests.recipes import plain_recipe

SCRIPT = "<script>alert(1)</script>"
NASTY = {"i00": SCRIPT, "i01": "</style></svg>&amp;\"'", "i02": "{{ 7 * 7 }}"}
VOID = {"meta", "br", "img", "input", "link", "hr"}
BUDGET = {"epsilon": 20.0, "delta": 1e-3}
SMALL = {"d": 8, "max_length": 6, "epochs": 2.0}


def recipe_of(preset: str | None = None, **options) -> Recipe:
    """A plain network by DP-SGD, or a preset; without a seed."""
    if preset is None:
        return plain_recipe(**{**BUDGET, **SMALL, **options})
    return make_recipe(preset, **{**BUDGET, **options})


class Page(HTMLParser):
    """Tags in order, text, and a complaint about any that does not close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(text)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "data-x7Qz"
    log = small_log(users=150)
    save(prepare(log.with_columns(title=pl.col("item_id").replace(NASTY)), title="title"), folder)
    return folder


@pytest.fixture(scope="module")
def make(data, tmp_path_factory):
    """A finished run, evaluated or not."""
    made: dict[str, Path] = {}

    def run(name: str, evaluated: bool = True, **options) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            opened = start(folder, data, recipe_of(**options))
            assert opened.train()
            opened.close()
            if evaluated:
                model = load_model(folder)
                held = held_out(opened.dataset.sequences, "test")
                found = evaluate(model, held, len(model.catalogue))
                (folder / "metrics.json").write_text(json.dumps({"not_private": True, "test": found.figures()}))
            made[name] = folder
        return made[name]

    return run


@pytest.fixture(scope="module")
def runs(make) -> list[Path]:
    return [make("network", reattention="logits"), make("counts", preset="transitions")]


@pytest.fixture(scope="module")
def html(runs) -> str:
    return make_report(runs).html


def test_the_page_is_whole_and_asks_for_nothing(html):
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("html") == 1
    assert not {"script", "link", "iframe", "img", "object", "base", "form"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action", "data"), (tag, name)
            if name == "href":
                assert value.startswith("#"), value
    assert not re.search(r"https?:|url\(|@import|//[a-z]", html)
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        ElementTree.fromstring(svg)


def test_ids_of_the_page_are_those_it_links_to(html):
    page = Page(html)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for _, a in page.tags if "href" in a} <= set(ids)


def test_titles_are_text_and_nothing_else(make):
    network = make("network", reattention="logits")
    html = make_report([network], ["i00, i01, i02"]).html
    assert SCRIPT not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;, then &lt;/style&gt;" in html
    assert "script" not in {tag for tag, _ in Page(html).tags}
    assert "{{ 7 * 7 }}" in Page(html).text
    assert "49" not in Page(html).text.split("For histories that were given")[1].split("Reproduce this run")[0]


def test_nobody_of_the_data_is_in_it(html, runs, data):
    users = small_log(users=150)["user_id"].unique().to_list()
    assert not any(user in html for user in [*users, "x7Qz", str(data)])
    assert not any(str(run.parent) in html for run in runs)


def test_the_data_is_not_needed(html, runs, data):
    away = data.rename(data.with_name("away"))
    try:
        assert make_report(runs).html == html
    finally:
        away.rename(data)


def test_figures_stand_with_their_protocol_and_marks(html, runs):
    page = Page(html)
    for run in runs:
        found = json.loads((run / "metrics.json").read_text())["test"]
        assert f"{100 * found['masked']['ndcg@10']['value']:.2f}" in page.text
        assert found["protocol"] in page.text
        statement = load_model(run).statement
        assert statement.attack.reading in page.text
        assert all(item in page.text for item in (*statement.not_covered, *statement.assumed_public))
    for title in ("What any attack can reach", "Budget over the steps", "The long tail", "Where attention goes"):
        assert f"{title} private: may be published" in page.text
    for title in ("By popularity of the item asked for", "Loss", "NDCG@10", "HIT@10"):
        assert f"{title} not private: keep to yourself" in page.text
    assert page.text.count("Where attention goes") == 1  # of the Transformer alone
    assert "with Re-Attention" in page.text
    assert "cannot be compared" not in page.text


def test_runs_of_different_protocols_are_not_compared(make, tmp_path):
    other = Path(shutil.copytree(make("counts", preset="transitions"), tmp_path / "other"))
    found = json.loads((other / "metrics.json").read_text())
    found["test"]["protocol"] = "another one"
    (other / "metrics.json").write_text(json.dumps(found))
    assert "cannot be compared" in make_report([make("counts", preset="transitions"), other]).html


@pytest.mark.parametrize(
    "options",
    [
        {"model": "gru"},
        {"histogram": False},
        {"preset": "popularity"},
        {"seed": 3},
        {"preset": "default", "vocabulary": 6, **SMALL, "transitions.share": 0.3},
    ],
    ids=["gru", "no histogram", "popularity", "seeded", "vocabulary and transitions"],
)
def test_any_run_without_metrics_says_what_to_do(make, options):
    folder = make("-".join(map(str, options.values())), evaluated=False, **options)
    report = make_report([folder])
    page = Page(report.html)
    assert f"dpformer evaluate {folder}" in page.text
    assert report.figures()[0]["metrics"] is None
    if "seed" in options:
        assert "Insecure." in page.text
        assert "may be published" not in page.text
    if "vocabulary" in options:
        assert "Where attention goes" in page.text
        assert "transitions 1" in page.text
    if "histogram" in options:
        assert "released no item histogram" in page.text


def test_a_run_without_privacy_says_so(make):
    page = Page(make_report([make("bare", epsilon=float("inf"), model="transformer")]).html)
    assert "Not private. Trained without noise" in page.text
    assert "may be published" not in page.text
    assert "What it promises" not in page.text


@pytest.mark.parametrize(
    "options",
    [
        {"reattention": "logits"},
        {"preset": "distilled", "d": 8},
        {"preset": "transitions"},
        {"preset": "default", "transitions.share": 0.3, **SMALL},
        {"model": "gru", "seed": 3, "tuning": {"kind": "listed", "configurations": ("d = 8", "it's d = 16")}},
        {"epsilon": float("inf"), "dropout": 0.25},
        {"histogram": False},
    ],
    ids=["plain", "distilled", "statistics", "default", "quoted", "infinite", "stages"],
)
def test_the_commands_make_the_same_recipe(options, tmp_path):
    recipe = recipe_of(**options)
    words = shlex.split(commands({"command": command(recipe)}, "a run")[1])
    assert words[:5] == ["dpformer", "fit", "DATA", "--run", "a run"]
    flags = list(zip(words[5::2], words[6::2], strict=True))
    settings = {k.removeprefix("--"): v for k, v in flags if k != "--set"}
    settings |= parse_settings([v for k, v in flags if k == "--set"])
    assert make_recipe(**settings) == recipe


def test_the_command(dpformer, runs, tmp_path):
    done = dpformer("report", *runs, "-o", tmp_path / "page.html", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out, parse_constant=lambda name: pytest.fail(name))
    assert [run["model"] for run in found["runs"]] == ["transformer", "transitions"]
    assert found["runs"][0]["metrics"]["protocol"].startswith("test item")
    assert Path(found["report"]).read_text().startswith("<!doctype html>")
    plain = dpformer("report", runs[0], "-o", tmp_path / "page.html")
    assert plain.out == f"written to {tmp_path / 'page.html'}\n"


def test_mistakes_are_one_line(dpformer, runs, tmp_path):
    for arguments, text in [
        ([tmp_path], "config.json"),
        ([runs[0], "--history", "no such item"], "'no such item'"),
        ([runs[0], "-o", tmp_path / "missing" / "page.html"], "cannot be written"),
    ]:
        done = dpformer("report", *arguments)
        assert done.code == 2
        assert done.err.startswith("error: ")
        assert text in done.err
        assert "Traceback" not in done.err
    damaged = Path(shutil.copytree(runs[0], tmp_path / "damaged"))
    (damaged / "metrics.json").write_text('{"test": {"masked": {}}}')
    with pytest.raises(DPFormerError, match=r"is damaged.*dpformer evaluate"):
        make_report([damaged])


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_scrolling_sideways(html, tmp_path, width):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a chromium in PATH")
    # A frame, since a headless window is never narrower than 500.
    (tmp_path / "page.html").write_text(
        f"""<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(html)}"
        onload="document.title = `${{this.contentWindow.innerWidth}} ${{this.contentDocument.documentElement.scrollWidth}}`">"""
    )
    command = [
        *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", f"file://{tmp_path / 'page.html'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    inner, scroll = map(int, re.search(r"<title>(\d+) (\d+)</title>", done.stdout).groups())
    assert inner == width
    assert scroll <= inner
