"""The README: its tables are those of docs/results, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from scripts.dist import absolute
from scripts.readme_tables import fill

ROOT = Path(__file__).parent.parent


def test_its_tables_are_current():
    text = (ROOT / "README.md").read_text()
    assert text == fill(text), "run: make pages"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_its_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", (ROOT / page).read_text())
    missing = [link for link in links if not (ROOT / link.partition("#")[0]).exists()]
    assert not missing


def test_on_a_package_index_its_links_are_those_of_the_repository():
    text = "![a](docs/a.png) [b](docs/b.md#c) [d](https://e.f) [g](#h)"
    base = "https://x.y/z"
    assert absolute(text, base + "/") == (
        f"![a]({base}/raw/main/docs/a.png) [b]({base}/blob/main/docs/b.md#c) [d](https://e.f) [g](#h)"
    )
