"""Tables on a terminal."""

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, whose columns are as wide as their widest cell; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    for line in table_lines(rows):
        print(line)
