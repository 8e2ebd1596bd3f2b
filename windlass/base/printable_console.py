"""A console of rich for tables and messages that quote other people's text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from windlass.base.text import escape_unprintable


class PrintableConsole(Console):
    """A console that prints strings, in tables too, with every control character escaped."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Convert a string for output: all that is printed as `str` passes here."""
        return super().render_str(escape_unprintable(text), **settings)
