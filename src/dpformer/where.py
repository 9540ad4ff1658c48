"""Conditions on the rows of a table, written as SQL: `qty > 0 and shop = 'north'`. Each row is judged by itself.

A condition may come over HTTP, so its words are checked before polars parses it: polars opens the files of a subquery
(`select ... from read_csv('...')`) while it parses, and ends the process on a chain of some thousand operators.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import polars as pl

from dpformer.errors import DataError

# Functions whose value in a row depends on that row alone, and which make no text longer than their arguments together: an
# aggregate would let one person's rows decide about the rows of others, and nested calls of `replace` would fill the memory.
_FUNCTIONS = set(
    "abs ceil ceiling floor round mod div coalesce ifnull nullif if cast try_cast lower upper trim ltrim rtrim left right "
    "substr substring concat concat_ws length char_length character_length octet_length starts_with ends_with regexp_like "
    "array_contains extract date_part year quarter month week day hour minute second".split()
)
_KEYWORDS = set("and or not in between like ilike when then else is case regexp rlike".split())
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_TEXT_MARK, _NAME_MARK = "\x00", "\x01"
# What could hide a word from the check: other quotes, escapes, comments, prefixes of texts (E'...').
_HIDING = re.compile(r"[^\w\s+*/%<>=!|~(),.:\x00\x01-]|--|/\*|\w\x00")
_SUBQUERY = re.compile(r"\bselect\b|\(\s*(from|table|values|with)\b")
# Names, words and operators, but for the sign of a number in a list: each level of an expression has one of them. polars reads
# expressions of a limited depth, and recurses.
_PART = re.compile(r"(?<![,(])(?<![,(] )[-+*/%<>=!|~:]+|[^\W\d]\w*")
_MOST_PARTS = 200
_NODES = {"Column", "Literal", "BinaryExpr", "Cast", "Ternary", "Function"}
_FIELDS = {"BinaryExpr": ("left", "right"), "Cast": ("expr",), "Ternary": ("predicate", "truthy", "falsy")}
_ARITHMETIC = {"Plus", "Minus", "Multiply", "Divide", "TrueDivide", "FloorDivide", "Modulus"}
_ORDER = {"Lt", "LtEq", "Gt", "GtEq"}
_TEXT, _NUMBER, _TRUTH, _DATE = "text", "a number", "true or false", "a date such as 2025-02-01 or 01.02.2025"
_ISO = r"^\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?$"


@dataclass(frozen=True)
class Condition:
    """A condition that fits a table.

    expression: true for rows to keep. unreadable: column to what it must be and an expression that is true for rows where it is
    not, such as ("a number", ...).
    """

    expression: pl.Expr
    unreadable: dict[str, tuple[str, pl.Expr]]


def columns_of(text: str, option: str = "--where") -> list[str]:
    """The columns that a condition names; a `DataError` if it is not a condition on single rows."""
    return sorted(set(_parse(text, option)[0].meta.root_names()))


def condition(text: str, schema: pl.Schema, option: str = "--where") -> Condition:
    """Fit a condition to a table.

    In a column of text the condition decides whether numbers, true/false or text are meant, never the rows: one odd value would
    change the type for all.
    """
    parsed, tree = _parse(text, option)
    names = sorted(set(parsed.meta.root_names()))
    if not names:
        raise DataError(f"{option} {text!r} names no column; write a condition such as: qty > 0")
    for name in names:
        if name not in schema:
            raise DataError(f"{option} {text!r}: there is no column {name!r}; the columns are {', '.join(schema)}")
    kinds: dict[str, str] = {}
    _meant(tree, _TRUTH, kinds)
    texts = [name for name in names if schema[name] == pl.String and kinds[name] not in (_TEXT, "")]
    for name in texts:  # the kind is a date as it was typed, if its form cannot be compared
        if kinds[name] not in (_NUMBER, _TRUTH, _DATE):
            raise DataError(
                f"{option} {text!r}: {name!r} is compared with {kinds[name]!r}; write dates as '2025-02-01 10:00'"
            )
    read = {name: _read(name, kinds[name]) for name in texts}
    trees = {name: json.loads(one.meta.serialize(format="json")) for name, one in read.items()}
    try:
        expression = pl.Expr.deserialize(json.dumps(_replaced(tree, trees)).encode(), format="json") if read else parsed
    except pl.exceptions.ComputeError:
        raise _too_long(text, option) from None
    try:
        made = pl.DataFrame(schema={name: schema[name] for name in names}).select(expression)
        reason = "" if made.dtypes == [pl.Boolean] else "it is not true or false"
    except pl.exceptions.PolarsError as error:
        reason = str(error).strip().splitlines()[0]
    if reason:
        cure = "write a condition such as: qty > 0"
        if any(schema[name].is_temporal() for name in names):
            cure = "compare dates with dates, such as: day >= date '2025-02-01'"
        raise DataError(f"{option} {text!r} does not fit the columns ({reason}); {cure}")
    filled = {name: pl.col(name).str.strip_chars().fill_null("") != "" for name in read}
    return Condition(expression, {name: (kinds[name], filled[name] & one.is_null()) for name, one in read.items()})


def rows_where(text: str, frame: pl.DataFrame, option: str = "--where") -> pl.Series:
    """Which rows of a table meet a condition, bool; where it is null they do not. A value that cannot be read is an error."""
    fitted = condition(text, frame.schema, option)
    for name, (kind, unreadable) in fitted.unreadable.items():
        wrong = frame.lazy().with_row_index("row").filter(unreadable).head(1).collect()
        if len(wrong):
            raise DataError(
                f"{option} {text!r}: row {wrong['row'][0] + 1:,} has {wrong[name][0]!r} in {name!r}, which is not {kind}"
            )
    return frame.select(fitted.expression.fill_null(False)).to_series()


def _parse(text: str, option: str) -> tuple[pl.Expr, Any]:
    """The expression, and the tree of its nodes."""
    _check_words(text, option)
    try:
        parsed = pl.sql_expr(text)
        tree = json.loads(parsed.meta.serialize(format="json"))
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        quotes = 'put a name with blanks or signs, or that is a word of SQL, in double quotes: "user"'
        cure = f"write a condition such as: qty > 0; {quotes}"
        raise DataError(f"{option} {text!r} cannot be read ({reason}); {cure}") from None
    if not _alone(tree):
        raise _refused(text, option)
    return parsed, tree


def _check_words(text: str, option: str) -> None:
    plain = _QUOTED.sub(lambda quoted: _TEXT_MARK if quoted[0][0] == "'" else _NAME_MARK, text).lower()
    if _TEXT_MARK in text or _NAME_MARK in text or _HIDING.search(plain):
        odd = "it may hold names, numbers, 'texts', operators and parentheses, and no comments"
        raise DataError(f"{option} {text!r} cannot be read ({odd}); write a condition such as: qty > 0")
    called = set(re.findall(rf"([\w{_NAME_MARK}]+)\s*\(", plain))
    if not called <= _FUNCTIONS | _KEYWORDS or _SUBQUERY.search(plain):
        raise _refused(text, option)
    if len(_PART.findall(plain)) > _MOST_PARTS:
        raise _too_long(text, option)


def _refused(text: str, option: str) -> DataError:
    return DataError(
        f"{option} {text!r} is refused: a condition looks at one row alone (comparisons, and, or, not, in, between, like, "
        "is null, arithmetic, lower, length, round and the other functions that docs/data.md lists), so that no person's rows "
        "decide about others'"
    )


def _too_long(text: str, option: str) -> DataError:
    start = text[:60]
    return DataError(
        f"{option} {start!r}... is too long: it joins too many parts; write a list as: item_id in ('a', 'b', ...)"
    )


def _alone(node: Any) -> bool:
    """Whether a node is made of values of its own row."""
    kind, content = _opened(node)
    return kind in _NODES and all(_alone(part) for part in _parts(kind, content))


def _opened(node: Any) -> tuple[str, Any]:
    return next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else (str(node), {})


def _function(content: Any) -> tuple[str, str]:
    """Group and name of a function."""
    function = content["function"]
    group, name = _opened(function) if isinstance(function, dict) else ("", function)
    return group, next(iter(name)) if isinstance(name, dict) else str(name)


def _parts(kind: str, content: Any) -> list[Any]:
    """The expressions inside a node."""
    return list(content["input"]) if kind == "Function" else [content[field] for field in _FIELDS.get(kind, ())]


def _meant(node: Any, kind: str, kinds: dict[str, str]) -> None:
    """Write down what each column must be, if `node` must be of this kind."""
    name, content = _opened(node)
    parts = _parts(name, content)
    if name == "Column":
        # Text that is compared with text anywhere stays text, unless it is a date; `is null` says nothing.
        before = kinds.get(content, "")
        kinds[content] = before if not kind or before == _DATE or (before == _TEXT and kind != _DATE) else kind
        return
    if name == "BinaryExpr" and content["op"] not in ("And", "Or"):
        literal = next((made for made in map(_literal, parts) if made is not None), None)
        compared = _NUMBER if content["op"] in _ORDER | _ARITHMETIC else _TEXT
        kind = literal or compared
        value = next((made for made in map(_date_text, parts) if made is not None), None)
        if content["op"] in _ORDER and value is not None:
            kind = _DATE if re.match(_ISO, value) else value
    elif name == "Cast":
        kind = _TRUTH if content["dtype"] == {"Literal": "Boolean"} else _TEXT
    elif name == "Function":
        function = _function(content)[1]
        if function in ("IsIn", "IsBetween", "Coalesce"):
            kind = next((made for made in map(_literal, parts) if made is not None), _TEXT)
        else:
            numeric = function in ("Abs", "Floor", "Ceil", "Round", "Binary")
            kind = _TRUTH if function == "Not" else _NUMBER if numeric else "" if "Null" in function else _TEXT
    for place, part in enumerate(parts):
        _meant(part, _TRUTH if name == "Ternary" and place == 0 else kind, kinds)


def _literal(node: Any) -> str | None:
    """What a literal is; None for anything else."""
    kind, content = _opened(node)
    if kind == "BinaryExpr" and content["op"] in _ARITHMETIC:
        return _NUMBER
    if kind != "Literal":
        return None
    form, value = _opened(content)
    if form == "Series":
        dtype: Any = pl.read_ipc_stream(bytes(value)).dtypes[0]
        dtype = getattr(dtype, "inner", dtype)
        return _NUMBER if dtype.is_numeric() else _TRUTH if dtype == pl.Boolean else _TEXT
    made = "Int" if form == "Dyn" else _opened(value)[0]
    return _TRUTH if made == "Boolean" else _NUMBER if "Int" in made or "Float" in made else _TEXT


def _date_text(node: Any) -> str | None:
    """A literal that begins like a date of any form."""
    kind, content = _opened(node)
    value = content.get("Scalar", {}).get("String") if kind == "Literal" and isinstance(content, dict) else None
    return value if value is not None and re.match(r"\d{4}-\d|\d{1,2}[./]\d{1,2}[./]\d", value) else None


def _read(name: str, kind: str) -> pl.Expr:
    """Read text as numbers, as true/false, or as dates that are sorted as text: 2025-02-01 10:00."""
    word = pl.col(name).str.strip_chars().str.to_lowercase()
    if kind == _DATE:
        iso = word.str.replace(r"^(\d\d)\.(\d\d)\.(\d{4})", "${3}-${2}-${1}").str.replace(r"(\d)t(\d)", "${1} ${2}")
        return pl.when(iso.str.contains(r"^\d{4}-\d\d-\d\d")).then(iso)
    if kind == _NUMBER:
        return word.cast(pl.Float64, strict=False)
    return pl.when(word.is_in(["true", "yes", "1"])).then(True).when(word.is_in(["false", "no", "0"])).then(False)


def _replaced(node: Any, columns: dict[str, Any]) -> Any:
    """Put these expressions in place of columns."""
    if isinstance(node, list):
        return [_replaced(part, columns) for part in node]
    if not isinstance(node, dict) or "Literal" in node:
        return node
    if node.keys() == {"Column"}:
        return columns.get(node["Column"], node)
    return {name: _replaced(part, columns) for name, part in node.items()}
