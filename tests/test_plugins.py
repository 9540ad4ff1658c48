"""Commands of other packages: found by their entry points, and harmless when they are missing or broken."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpformer.cli import plugins

WORKS = """
import typer

def greet(name: str, loud: bool = False) -> None:
    "Say hello."
    typer.echo(f"hello {name}".upper() if loud else f"hello {name}")

def taken() -> None:
    "Would replace a command of ours."
"""
BROKEN = {"raises": "import no_such_module", "exits": "raise SystemExit(3)", "empty": ""}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dpformer):
    """The command line with a package of plugins on the path: one that works, and broken ones."""
    site = tmp_path / "site"
    points = ["greet = works_plugin:greet", "prepare = works_plugin:taken"]
    (site / "plugins_for_tests-1.0.dist-info").mkdir(parents=True)
    (site / "works_plugin.py").write_text(WORKS)
    for name, text in BROKEN.items():
        (site / f"{name}_plugin.py").write_text(text)
        points.append(f"{name} = {name}_plugin:command")
    info = site / "plugins_for_tests-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins-for-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{plugins.GROUP}]", *points, ""]))
    monkeypatch.syspath_prepend(site)
    plugins.plugins.cache_clear()
    yield dpformer
    plugins.plugins.cache_clear()


def test_a_plugin_is_a_command_like_any_other(installed):
    assert installed("greet", "you", "--loud").out == "HELLO YOU\n"
    assert "Say hello." in installed("greet", "--help").out
    shown = installed("--help")
    assert shown.code == 0
    assert "Say hello." in shown.out


def test_a_broken_plugin_is_listed_and_says_why_when_it_is_called(installed):
    shown = installed("--help")
    assert shown.code == 0
    for name, reason in (("raises", "no_such_module"), ("exits", "SystemExit"), ("empty", "command")):
        assert name in shown.out
        for arguments in (["--whatever", "1", "two"], ["--help"]):
            done = installed(name, *arguments)
            assert done.code == 2
            assert len(done.err.strip().splitlines()) == 1
            for word in (reason, "plugins-for-tests", "pip uninstall"):
                assert word in done.err


def test_a_plugin_does_not_replace_a_command(installed):
    assert "Would replace" not in installed("prepare", "--help").out
    assert installed("--help").out.count(" prepare ") == 1


def test_only_the_plugin_that_is_called_is_loaded(installed, monkeypatch):
    names = ("works_plugin", *(f"{name}_plugin" for name in BROKEN))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    tried = []
    real = plugins.load
    monkeypatch.setattr(plugins, "load", lambda point: tried.append(point.name) or real(point))
    installed("prepare", "--help")
    assert (tried, set(names) & set(sys.modules)) == ([], set())
    assert installed("greet", "you").out == "hello you\n"
    assert (tried, set(names) & set(sys.modules)) == (["greet"], {"works_plugin"})


def test_without_the_experiments_package_its_commands_say_where_they_come_from(dpformer, monkeypatch):
    monkeypatch.setattr(plugins, "plugins", dict)
    for name in plugins.EXPERIMENTS:
        for arguments in ([], ["training", "--quick", "-o", "x"], ["--help"]):
            done = dpformer(name, *arguments)
            assert done.code == 2
            assert f"{name} comes with the experiments package" in done.err
            assert "pip install ./experiments" in done.err
    assert dpformer("no-such-command").code == 2


def test_help_is_light_with_all_plugins():
    code = "import sys; sys.argv[1:] = ['--help']; from dpformer.cli import main\ntry: main()\nexcept SystemExit: pass"
    code += "\nassert not {'torch', 'polars', 'matplotlib', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_library_does_not_import_the_experiments():
    source = Path(plugins.__file__).parents[1]
    assert (source / "estimator.py").exists()
    assert [path for path in source.rglob("*.py") if "dpformer_experiments" in path.read_text()] == []
