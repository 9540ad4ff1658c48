"""The README: its tables are those of docs/results, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from scripts.readme_tables import fill

ROOT = Path(__file__).parent.parent


def test_its_tables_are_current():
    text = (ROOT / "README.md").read_text()
    assert text == fill(text), "run: python scripts/readme_tables.py README.md"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_its_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", (ROOT / page).read_text())
    missing = [link for link in links if not (ROOT / link.partition("#")[0]).exists()]
    assert not missing
