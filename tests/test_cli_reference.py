"""The reference of the command line is that of the commands."""

from pathlib import Path

from scripts.cli_reference import reference

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"


def test_the_page_is_current():
    assert PAGE.read_text() == reference(), "run: make pages"


def test_it_has_every_command_with_its_options():
    page = reference()
    assert "## `dpformer fit`" in page
    assert "| `--epsilon` |" in page
    assert "### `dpformer account new`" in page
