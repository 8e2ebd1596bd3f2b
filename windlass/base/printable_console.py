"""rich console for tables and messages that quote text of other programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from windlass.base.text import escape_unprintable

WIDTH_WITHOUT_TERMINAL = 170


class PrintableConsole(Console):
    """Console that escapes control characters in all strings, including those in tables.

    Where the output is not a terminal, lines are up to 170 characters wide unless a width or COLUMNS is set.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if not self.is_terminal and self._width is None:  # neither the caller nor COLUMNS sets the width
            self.width = WIDTH_WITHOUT_TERMINAL

    def render_str(self, text: str, **settings: Any) -> Text:
        """Convert a string for output. All `str` values pass through this method."""
        return super().render_str(escape_unprintable(text), **settings)
