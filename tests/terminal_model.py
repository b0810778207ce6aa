"""A terminal as far as the tests need one: what is on its screen after a stream of bytes.

Unknown escape sequences are errors, so that the model cannot be too simple unnoticed.
"""

import re

_SEQUENCE = re.compile(r"\x1b(?:\[(\??[\d;]*)([A-Za-z])|([78DM]))")


class TerminalModel:
    """A screen of characters with a scrolling region, and the lines that have scrolled off it."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.history: list[str] = []
        self.row = self.column = 0
        self._saved = (0, 0)
        self._wraps = False
        self.first, self.last = 0, rows - 1
        self._rest = ""

    def feed(self, data: bytes | str) -> None:
        """Interpret bytes, of which the last sequence may be incomplete."""
        text = self._rest + (data if isinstance(data, str) else data.decode())
        self._rest, at = "", 0
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
                continue
            found = _SEQUENCE.match(text, at)
            if found is None:
                if len(text) - at < 20 and re.fullmatch(r"\x1b(\[\??[\d;]*)?", text[at:]):
                    self._rest = text[at:]
                    return
                raise ValueError(f"unknown sequence {text[at : at + 20]!r}")
            self._obey(*found.groups())
            at = found.end()

    def lines(self) -> list[str]:
        """Return the screen's lines."""
        return ["".join(row).rstrip() for row in self.cells]

    def text(self) -> str:
        """Return all lines, with those that have scrolled off."""
        return "\n".join([*self.history, *self.lines()])

    def resize(self, columns: int, rows: int) -> None:
        """Change the size as xterm does: the text stays where it is, and all rows scroll."""
        surplus = max(0, self.row - rows + 1)
        for row in self.cells[:surplus]:
            self.history.append("".join(row).rstrip())
        kept = [(row + [" "] * columns)[:columns] for row in self.cells[surplus : surplus + rows]]
        self.cells = kept + [[" "] * columns for _ in range(rows - len(kept))]
        self.row, self.column = self.row - surplus, min(self.column, columns - 1)
        self.columns, self.rows = columns, rows
        self.first, self.last = 0, rows - 1

    def _put(self, char: str) -> None:
        if char == "\n":
            self._line_down()
        elif char == "\r":
            self.column, self._wraps = 0, False
        elif char == "\t":
            self.column = min(self.columns - 1, self.column // 8 * 8 + 8)
        elif char.isprintable():
            if self._wraps:
                self.column = 0
                self._line_down()
            self.cells[self.row][self.column] = char
            self._wraps = self.column == self.columns - 1
            self.column = min(self.columns - 1, self.column + 1)
        elif char not in "\x07\x0f":
            raise ValueError(f"unknown character {char!r}")

    def _line_down(self) -> None:
        self._wraps = False
        if self.row != self.last:
            self.row = min(self.rows - 1, self.row + 1)
            return
        gone = self.cells.pop(self.first)
        if self.first == 0:
            self.history.append("".join(gone).rstrip())
        self.cells.insert(self.last, [" "] * self.columns)

    def _obey(self, numbers: str | None, letter: str | None, single: str | None) -> None:
        if single == "7":
            self._saved = (self.row, self.column)
        elif single == "8":
            self.row, self.column = (
                min(self._saved[0], self.rows - 1),
                min(self._saved[1], self.columns - 1),
            )
            self._wraps = False
        elif single == "D":
            self._line_down()
        elif letter != "m":
            given = [int(number or 0) for number in (numbers or "").split(";")]
            self._obey_long(letter or "", given)

    def _obey_long(self, letter: str, given: list[int]) -> None:
        self._wraps = False
        one = max(1, given[0])
        if letter == "H":
            self.row = min(one, self.rows) - 1
            self.column = min(max(1, given[1] if len(given) > 1 else 1), self.columns) - 1
        elif letter == "A":
            self.row = max(self.first if self.row >= self.first else 0, self.row - one)
        elif letter == "r":
            self.first = one - 1
            self.last = (given[1] if len(given) > 1 and given[1] else self.rows) - 1
            self.row = self.column = 0
        elif letter == "K" and given[0] in (0, 2):
            start = 0 if given[0] == 2 else self.column
            self.cells[self.row][start:] = [" "] * (self.columns - start)
        elif letter == "J" and given[0] == 0:
            self._obey_long("K", [0])
            for row in range(self.row + 1, self.rows):
                self.cells[row] = [" "] * self.columns
        else:
            raise ValueError(f"unknown sequence {given}{letter}")
