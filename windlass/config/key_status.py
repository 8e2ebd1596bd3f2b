"""Status of a key (honoured, accepted without effect, refused), and the functions that declare fields with one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, cast

from pydantic import Field
from pydantic.fields import FieldInfo


class KeyStatus(StrEnum):
    """Effect of a key: it works, it is accepted without effect, or it is refused."""

    HONOURED = "honoured"
    ACCEPTED = "accepted"
    REFUSED = "refused"


def honoured(
    default: Any = ..., *, aliases: Sequence[str] = (), windlass_only: bool = False, **constraints: Any
) -> Any:
    """Declare a field that takes effect. `aliases`: other spellings; `windlass_only`: DeepSpeed lacks the key."""
    return _make_field(default, KeyStatus.HONOURED, "", aliases, windlass_only, constraints)


def accepted(default: Any, reason: str, *, aliases: Sequence[str] = (), **constraints: Any) -> Any:
    """Declare a field whose type is checked and whose value has no effect; `reason` explains why that is correct."""
    return _make_field(default, KeyStatus.ACCEPTED, reason, aliases, False, constraints)


def refused(default: Any, reason: str, *, aliases: Sequence[str] = (), **constraints: Any) -> Any:
    """Declare a field that is refused if its value is not `default`; `reason` explains why."""
    return _make_field(default, KeyStatus.REFUSED, reason, aliases, False, constraints)


def _make_field(
    default: Any,
    status: KeyStatus,
    reason: str,
    aliases: Sequence[str],
    windlass_only: bool,
    constraints: dict[str, Any],
) -> Any:
    if isinstance(default, type):
        constraints["default_factory"] = default
    else:
        constraints["default"] = default
    facts = {"status": status.value, "reason": reason, "aliases": list(aliases), "windlass_only": windlass_only}
    return Field(json_schema_extra={"windlass": cast(Any, facts)}, **constraints)


def key_facts(field: FieldInfo) -> dict[str, Any]:
    """Return the status, reason, aliases and `windlass_only` with which `field` was declared."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "windlass" not in extra:
        raise TypeError(f"field {field!r} carries no status; declare it with honoured(), accepted() or refused()")
    return cast(dict[str, Any], extra["windlass"])
