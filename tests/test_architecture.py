"""The rooms of the package: who may import whom, how many names each shows, and what a released model needs."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from scripts.sizes import fill

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dpformer"
ANY = {"errors", "files", "notebook", "svg", "where", "__version__"}
RELEASED = {"artifact", "models", "privacy"}
# What each room may import beside itself and ANY. Rooms that are not here may import everything.
MAY_IMPORT: dict[str, set[str]] = {
    "clipping": set(),
    "data": set(),
    "privacy": set(),
    "models": set(),
    "statistics": {"privacy"},
    "artifact": {"models", "privacy"},
    "evaluation": {"data", "models"},
    "export": RELEASED,
    "serve": RELEASED,
    "report": RELEASED | {"evaluation"},
    "training": RELEASED | {"clipping"},
    "fit": RELEASED | {"clipping", "data", "statistics", "training"},
    "trust": RELEASED | {"clipping", "data", "statistics", "training", "fit", "evaluation", "report"},
}
SHOWN = ("training", "models", "artifact", "statistics", "evaluation", "export", "report")


def imports(path: Path) -> set[str]:
    """The rooms of dpformer that a file names, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= set(inner) if node.module == "dpformer" else {node.module or ""}
    return {name.split(".")[1] for name in names if name.startswith("dpformer.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_it_may(room):
    for path in (SOURCE / room).rglob("*.py"):
        others = imports(path) - ANY - {room}
        assert others <= MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {sorted(others - MAY_IMPORT[room])}"


@pytest.mark.parametrize("module", ["artifact", "serve.app", "export", "report"])
def test_a_released_model_is_used_without_the_code_that_fitted_it(module):
    program = f"import sys, dpformer.{module}; print(*(name for name in sys.modules if name.startswith('dpformer')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert f"dpformer.{module}" in loaded
    assert not [name for name in loaded if name.split(".")[1:2] in (["fit"], ["clipping"], ["trust"])]


@pytest.mark.parametrize("room", SHOWN)
def test_a_room_shows_few_names_and_the_documentation_has_them(room):
    shown = import_module(f"dpformer.{room}").__all__
    assert len(shown) <= 15
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    assert sorted(re.findall(rf"^::: dpformer\.{room}\.(\w+)$", pages, re.MULTILINE)) == sorted(shown)


def test_no_module_is_long():
    lengths = {path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {name: lines for name, lines in lengths.items() if lines > 300}


def test_the_table_of_sizes_is_of_today():
    """Within 5 %, so that not every change is one of the page; and each room has a row."""
    page = (ROOT / "docs" / "design.md").read_text()
    now, then = (
        re.findall(r"^\| (.+?) \| [\d,]* \| ([\d,]+) \| ([\d,]+) \|", text, re.M) for text in (fill(page), page)
    )
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"`(\w+)`", " ".join(name for name, *_ in now))) == rooms
    for (name, *today), (_, *written) in zip(now, then, strict=True):
        for new, old in zip(today, written, strict=True):
            one, other = (int(text.replace(",", "")) for text in (new, old))
            assert abs(one - other) <= 0.05 * one, (
                f"{name}: {new}, not {old}; run: python scripts/sizes.py docs/design.md"
            )


def uses(pattern: str) -> set[str]:
    """The modules, but for `trust`, which checks runs and releases nothing, with a line that has this pattern."""
    modules = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    return {name for name, text in modules.items() if not name.startswith("trust/") and re.search(pattern, text)}


def test_noise_is_added_and_people_meet_a_query_in_one_place():
    assert uses(r"import .*\brounded_gaussian\b|\brounded_gaussian\(") == {"privacy/curator.py", "privacy/noise.py"}
    assert uses(r"\+ self\._noise\(") == {"privacy/curator.py"}
    assert uses(r"\bquery\.sum\b") == {"privacy/curator.py"}
    text = (SOURCE / "privacy" / "curator.py").read_text()
    assert text.count("self._noise(") == text.count("add_up(self._people") == 1
    # Other generators of Gaussians draw initial weights, the start of the low-rank iteration, and what splits released values.
    others = uses(r"torch\.(randn|normal)|\.normal_?\(|\.standard_normal\(|random\.gauss")
    assert others == {
        "models/network.py",
        "models/transformer.py",
        "statistics/free_tuning.py",
        "statistics/low_rank.py",
    }
