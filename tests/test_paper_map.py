"""Each equation of the paper has one file, whose text names it by its LaTeX label."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = {
    "eq:DPSGD": "fit/dpsgd.py",
    "eq:phantom": "clipping/tied.py",
    "eq:effectiveerror": "models/error.py",
    "eq:linearnpn": "models/error.py",
    "eq:relunpn": "models/error.py",
    "eq:nonprop": "models/transformer.py",
    "eq:reattnbias": "models/reattention.py",
}


@pytest.mark.parametrize("label", PLACES)
def test_an_equation_is_named_where_it_is_computed(label):
    assert label in (ROOT / "src" / "dpformer" / PLACES[label]).read_text()


def test_the_design_page_has_the_map():
    page = (ROOT / "docs" / "design.md").read_text()
    for label, place in PLACES.items():
        assert f"| `{label}` | `{place}` |" in page


def test_the_paper_has_these_labels():
    paper = ROOT.parent / "shared" / "paper" / "dpformer.tex"
    if not paper.is_file():
        pytest.skip("the paper's source is not at hand")
    text = paper.read_text()
    assert all(f"\\label{{{label}}}" in text for label in PLACES)
