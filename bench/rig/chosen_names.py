"""Names that the option `--only` of a script may list."""

from __future__ import annotations

from collections.abc import Collection

import typer


def choose_names(text: str, names: Collection[str], separator: str) -> list[str]:
    """Return the names that `text` lists, in the order of `names`.

    Raises:
        BadParameter: `text` lists a name that is not in `names`.
    """
    requested = {word.strip() for word in text.split(separator)}
    if missing := requested - set(names):
        joint = f"{separator} "
        raise typer.BadParameter(f"--only {joint.join(sorted(missing))}: there are {joint.join(names)}")
    return [name for name in names if name in requested]
