"""Tables of plain text, at most 100 columns wide, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH = 100


def number(value: Any, digits: int = 3) -> str:
    """A value for a table: `digits` significant figures, separators in whole numbers, None a dash.

    Figures before the point are all kept: 12,345.6 is 12,346 and not 12,300.
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 10 ** (digits - 1) and value == value):
        return f"{value:,.0f}"
    if value != value or value == 0:
        return f"{value:.{digits - 1}f}"
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}"
    return text.rstrip(".")


def size(count: float) -> str:
    """A count in powers of ten: 1.41M, 2.78T."""
    for bound, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= bound:
            return f"{count / bound:.3g}{letter}"
    return f"{count:g}"


def render(rows: Sequence[Sequence[Any]], head: Sequence[str] = (), width: int = WIDTH) -> str:
    """Aligned columns under an optional head; numbers to the right, text to the left.

    Wider than `width`, the widest text column is cut with an ellipsis, in every row alike.
    """
    cells = [[number(cell) for cell in row] for row in rows]
    right = [
        any(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows)
        for i in range(len(rows[0]) if rows else 0)
    ]
    lines = [list(head), *cells] if head else cells
    if not lines:
        return ""
    right = right or [False] * len(lines[0])
    widths = _fit([max(len(line[i]) for line in lines) for i in range(len(lines[0]))], right, width)
    drawn = [_line(line, widths, right) for line in lines]
    if head:
        drawn.insert(1, "  ".join("-" * column for column in widths))
    return "\n".join(line.rstrip() for line in drawn)


def render_rows(rows: Sequence[dict[str, Any]], width: int = WIDTH) -> str:
    """`render` for rows as dicts with the same keys, which are the head."""
    head = list(rows[0]) if rows else []
    return render([[row[key] for key in head] for row in rows], head, width)


def _fit(widths: list[int], right: list[bool], width: int) -> list[int]:
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    while excess > 0:
        text = [i for i, numeric in enumerate(right) if not numeric] or list(range(len(widths)))
        widest = max(text, key=lambda i: widths[i])
        if widths[widest] <= 4:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _line(cells: list[str], widths: list[int], right: list[bool]) -> str:
    drawn = []
    for cell, column, numeric in zip(cells, widths, right, strict=True):
        cell = cell if len(cell) <= column else cell[: column - 1] + "…"
        drawn.append(cell.rjust(column) if numeric else cell.ljust(column))
    return "  ".join(drawn)


def markdown(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
    """A GitHub table. A bar in a cell is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = (number(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
