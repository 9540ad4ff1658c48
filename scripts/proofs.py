"""Has the code moved on since its proof was read? Compare the hashes in docs/proofs/ with the code.

    python scripts/proofs.py            name each function that is no longer what its page proves; exit code 1
    python scripts/proofs.py --write    after reading the page again: write the new hashes

A hash is of the syntax tree, without docstrings and comments, of a function, a class, a method or a constant.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROOFS = ROOT / "docs" / "proofs"
ROW = re.compile(r"^\| `(dpformer\.[\w.]+):([\w.]+)` \| `(\w*)` \|$", re.MULTILINE)


def tree_hash(module: str, name: str) -> str:
    """The hash of a name in a module, such as `Clip.factors` in `dpformer.clipping.clip`."""
    node: ast.AST = ast.parse((ROOT / "src" / (module.replace(".", "/") + ".py")).read_text())
    for part in name.split("."):
        node = next((one for one in getattr(node, "body", ()) if part in _names(one)), ast.Pass())
        if isinstance(node, ast.Pass):
            raise SystemExit(f"{module} has no {name}; its proof in docs/proofs names it")
    return hashlib.sha256(repr(_plain(node)).encode()).hexdigest()[:16]


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Assign):
        return {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    return {getattr(node, "name", "")}


def _plain(node: object) -> object:
    """The tree as nested tuples, without positions, docstrings and empty fields, which differ between versions of Python."""
    if isinstance(node, list):
        return tuple(_plain(one) for one in node)
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, []) and name != "ctx"}
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    return type(node).__name__, tuple((name, _plain(value)) for name, value in sorted(fields.items()))


def moved(page: str) -> list[tuple[str, str, str]]:
    """(row, name, new hash) of what is no longer what the page proves."""
    return [
        (row.group(0), f"{row[1]}:{row[2]}", new)
        for row in ROW.finditer(page)
        if (new := tree_hash(row[1], row[2])) != row[3]
    ]


def main() -> None:
    write, changed = "--write" in sys.argv, 0
    for path in sorted(PROOFS.glob("*.md")):
        page = path.read_text()
        for row, name, new in moved(page):
            changed += 1
            print(f"{path.relative_to(ROOT)}: {name} is now {new}")
            page = page.replace(row, row.rsplit("| `", 1)[0] + f"| `{new}` |")
        if write:
            path.write_text(page)
    if changed and not write:
        raise SystemExit("read these pages again; if they still hold: python scripts/proofs.py --write")


if __name__ == "__main__":
    main()
