"""The table of sizes: `python scripts/sizes.py docs/design.md`. Code is neither blank, comment nor docstring."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "dpformer"
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
OWNERS = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ROW = re.compile(r"^\| (.+?) \| ([\d,]*) \| [\d,]* \| [\d,]* \| (.*) \|$", re.MULTILINE)


def size(text: str) -> tuple[int, int]:
    """Lines, and lines of code."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in SKIPPED]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for owner in (node for node in ast.walk(ast.parse(text)) if isinstance(node, OWNERS)):
        if ast.get_docstring(owner, clean=False) is not None:
            code -= set(range(owner.body[0].lineno, (owner.body[0].end_lineno or 0) + 1))
    return len(text.splitlines()), len(code)


def fill(page: str) -> str:
    """The page with the sizes of today. A row names rooms, `root` the modules beside them; the rest of it stays."""
    sizes = {path.relative_to(SOURCE): size(path.read_text()) for path in SOURCE.rglob("*.py")}

    def row(match: re.Match[str]) -> str:
        rooms = {*re.findall(r"\w+", match[1])}
        names = [name for name in sizes if rooms & {"all", name.parts[0] if len(name.parts) > 1 else "root"}]
        lines, code = (sum(sizes[name][k] for name in names) for k in (0, 1))
        return f"| {match[1]} | {match[2]} | {lines:,} | {code:,} | {match[3]} |"

    return ROW.sub(row, page)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(fill(Path(sys.argv[1]).read_text()))
