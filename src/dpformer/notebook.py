"""What a notebook shows of an object: a small table in the notebook's own style. All text is escaped."""

from collections.abc import Sequence

from markupsafe import Markup


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """HTML of a title, a table whose first column names the row, and lines below it."""
    cell = Markup('<td style="text-align:left">{}</td>')
    lines = [Markup("<p><strong>{}</strong></p><table>").format(title)]
    if head:
        lines.append(Markup("<tr>{}</tr>").format(Markup("").join(Markup("<th>{}</th>").format(name) for name in head)))
    for name, *values in rows:
        cells = Markup("").join(cell.format(value) for value in values)
        lines.append(Markup('<tr><th style="text-align:left">{}</th>{}</tr>').format(name, cells))
    lines.append(Markup("</table>"))
    lines += [Markup("<p>{}</p>").format(note) for note in notes]
    return str(Markup("").join(lines))
