"""Keys that DeepSpeed passes over in silence, and windlass's own reader refuses: left out, and said once.

DeepSpeed looks only for the top-level keys that it knows (trl sends dotted ones), and reads `aio` and
`activation_checkpointing` key by key. In its other sections a key that is not known is an error, as here.
"""

from __future__ import annotations

from typing import Any

from windlass.base.log import logger
from windlass.config.loading import examine
from windlass.config.problems import Kind

_LENIENT = ("aio", "activation_checkpointing")
_said: set[str] = set()


def tolerated(source: Any) -> Any:
    """`source`, or a copy of its data without such keys.

    Raises:
        ConfigError: the source cannot be read at all.
    """
    found = examine(source)
    top = found.source.data
    strange = [
        problem.path for problem in found.problems if problem.kind is Kind.UNKNOWN and _lenient(problem.path, top)
    ]
    if not strange:
        return source
    data = {key: dict(value) if key in _LENIENT else value for key, value in top.items()}
    for path in strange:
        section, _, name = path.partition(".")
        if path in data:
            del data[path]
        else:
            data[section].pop(name)
    new = [path for path in strange if path not in _said]
    if new:
        _said.update(new)
        logger.warning("%s: DeepSpeed has no such keys, they are passed over: %s", found.source.name, ", ".join(new))
    return data


def _lenient(path: str, top: dict[str, Any]) -> bool:
    return path in top or path.partition(".")[0] in _LENIENT
