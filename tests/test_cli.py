"""The command line as a whole; commands have tests of their own."""

import subprocess
import sys

import dpformer


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dpformer", *arguments], capture_output=True, text=True)


def test_version():
    assert run("--version").stdout.strip() == f"dpformer {dpformer.__version__}"


def test_an_error_is_one_line_and_exit_code_2():
    done = run("show", "no-such-run")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no-such-run" in done.stderr


def test_help_does_not_import_torch():
    code = "import sys; from dpformer.cli.app import app; assert not {'torch', 'polars'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
