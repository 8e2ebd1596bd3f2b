"""rich console for tables and messages that quote foreign text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from windlass.base.text import escape_unprintable


class PrintableConsole(Console):
    """Console that escapes control characters in all strings, including those in tables."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Convert a string for output. All `str` values pass through this method."""
        return super().render_str(escape_unprintable(text), **settings)
