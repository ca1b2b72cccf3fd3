"""Tables of a page: facts as pairs, and rows that a reader can sort."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

TABLE_ASSETS = ("table.css", "table.js")


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, and what it is sorted by.

    Attributes:
      text: plain text.
      key: a number for columns of numbers, which stand to the right; None: sorted by the text.
      alarm: whether it is something wrong: shown in red, so `text` must say so in words.
    """

    text: str
    key: float | None = None
    alarm: bool = False


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A table of names and what they are, plain text; pairs without a value are left out."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in pairs
        if value
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>\n'


def rows_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, caption: str) -> str:
    """A table whose columns are sorted by pressing their names; needs `TABLE_ASSETS`.

    Args:
      columns: names, plain text.
      rows: one cell per column; a column is one of numbers if its cells have keys.
      caption: what it holds, plain text.
    """
    numeric = [any(row[i].key is not None for row in rows) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col" class="{_side(right)}"><button type="button">{escape(name)}</button></th>'
        for name, right in zip(columns, numeric, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(map(_cell, row, numeric))}</tr>\n" for row in rows
    )  # fmt: skip
    return (
        f'<div class="scroll tall" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="rows"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def _cell(cell: Cell, right: bool) -> str:
    key = "" if cell.key is None else f' data-key="{cell.key:.9g}"'
    alarm = " alarm" if cell.alarm else ""
    return f'<td class="{_side(right)}{alarm}"{key}>{escape(cell.text)}</td>'


def _side(right: bool) -> str:
    return "number" if right else "word"


def notice(text: str, *, alarm: bool = False) -> str:
    """A paragraph that must not be overlooked."""
    return f'<p class="notice{" alarm" if alarm else ""}">{escape(text)}</p>\n'
