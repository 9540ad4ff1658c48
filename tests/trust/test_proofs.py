"""A proof is of certain code: when that moves on, its page must be read again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import proofs  # noqa: E402

PAGES = sorted((ROOT / "docs" / "proofs").glob("*.md"))


def test_there_is_a_page_for_each_mechanism() -> None:
    assert [page.stem for page in PAGES] == ["composition", "gradients", "noise", "sampling", "selection", "statistics"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_proves_the_code_that_there_is(page: Path) -> None:
    text = page.read_text()
    assert len(proofs.ROW.findall(text)) >= 4
    for part in ("**Precondition.**", "**Pseudocode.**", "**Claim.**", "**Proof.**"):
        assert part in text
    changed = [name for _, name, _ in proofs.moved(text)]
    assert not changed, f"{changed}: read docs/proofs/{page.name} again, then: python scripts/proofs.py --write"


def test_a_change_of_code_is_seen_and_one_of_words_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    file = tmp_path / "src" / "dpformer" / "x.py"
    file.parent.mkdir(parents=True)

    def hashed(text: str) -> str:
        file.write_text(text)
        return proofs.tree_hash("dpformer.x", "C.f")

    code = 'class C:\n    def f(self, a):\n        """Words."""\n        return a * 2\n'
    assert (
        hashed(code)
        == hashed(code.replace("Words", "Other words"))
        == hashed(code.replace("return", "# why\n        return"))
    )
    assert hashed(code) == hashed(code.replace('        """Words."""\n', ""))
    assert hashed(code) != hashed(code.replace("2", "3"))
    with pytest.raises(SystemExit, match=r"has no C\.f"):
        hashed("x = 1\n")
