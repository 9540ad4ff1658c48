"""Build the package, check it, and try the wheel alone: `python scripts/dist.py dist [--repository URL]`.

The wheel is installed into a fresh environment of each supported Python that is on this machine, with the versions of
constraints.txt and nothing else, and runs `dpformer demo` there. `--repository` makes the relative links of README.md absolute
and names the repository in the metadata: on a package index a relative link leads nowhere.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")
PYTHONS = ("python3.11", "python3.12", "python3.13")


def absolute(readme: str, repository: str) -> str:
    """README.md with links, and pictures as files, of the repository."""
    base = repository.rstrip("/")
    pictures = re.sub(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)", rf"\1({base}/raw/main/\2)", readme)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({base}/blob/main/\1)", pictures)


def build(out: Path, repository: str | None) -> Path:
    """The wheel in `out`, which also gets the source archive."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        for part in PARTS:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
            copy(ROOT / part, source / part)
        if repository:
            (source / "README.md").write_text(absolute((ROOT / "README.md").read_text(), repository))
            settings = (source / "pyproject.toml").read_text()
            named = settings.replace("[project.urls]\n", f'[project.urls]\nRepository = "{repository}"\n')
            (source / "pyproject.toml").write_text(named)
        run(sys.executable, "-m", "build", "--outdir", out, source)
    wheels = sorted(out.glob("*.whl"))
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels, *out.glob("*.tar.gz"))
    return wheels[-1].resolve()


def try_wheel(wheel: Path, python: str) -> None:
    """Install it alone into a fresh environment, and run the demo in an empty folder."""
    with tempfile.TemporaryDirectory() as place:
        run(python, "-m", "venv", f"{place}/venv")
        run(f"{place}/venv/bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
        run(f"{place}/venv/bin/dpformer", "demo", "-o", f"{place}/demo", cwd=place)
        print(f"{python}: the wheel alone runs the demo")


def is_there(python: str) -> bool:
    """Whether it runs: a version manager may have a command that does not."""
    return shutil.which(python) is not None and subprocess.run([python, "-V"], capture_output=True).returncode == 0


def run(*command: object, cwd: str | None = None) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(word) for word in command], check=True, cwd=cwd, env=clean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repository")
    parser.add_argument("--python", action="append", help="An interpreter to try the wheel with; repeat for more.")
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    wheel = build(given.out, given.repository)
    for name in given.python or filter(is_there, PYTHONS):
        try_wheel(wheel, name)
