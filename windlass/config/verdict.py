"""What becomes of a key: honoured, accepted without effect, or refused; and the field makers that record it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, cast

from pydantic import Field
from pydantic.fields import FieldInfo


class Verdict(StrEnum):
    """The three answers to "what does this key do here?"."""

    HONOURED = "honoured"
    ACCEPTED = "accepted"
    REFUSED = "refused"


def honoured(default: Any = ..., *, also: Sequence[str] = (), native: bool = False, **constraints: Any) -> Any:
    """A field that does what it says. `also`: other spellings; `native`: a key that DeepSpeed does not have."""
    return _field(default, Verdict.HONOURED, "", also, native, constraints)


def accepted(default: Any, because: str, *, also: Sequence[str] = (), **constraints: Any) -> Any:
    """A field whose type is checked and whose value changes nothing here; `because` says why that is right."""
    return _field(default, Verdict.ACCEPTED, because, also, False, constraints)


def refused(default: Any, because: str, *, also: Sequence[str] = (), **constraints: Any) -> Any:
    """A field that loads, and is refused by name as soon as its value is not `default`; `because` says why."""
    return _field(default, Verdict.REFUSED, because, also, False, constraints)


def _field(
    default: Any, verdict: Verdict, because: str, also: Sequence[str], native: bool, constraints: dict[str, Any]
) -> Any:
    if isinstance(default, type):
        constraints["default_factory"] = default
    else:
        constraints["default"] = default
    facts = {"verdict": verdict.value, "because": because, "also": list(also), "native": native}
    return Field(json_schema_extra={"windlass": cast(Any, facts)}, **constraints)


def facts_of(field: FieldInfo) -> dict[str, Any]:
    """The verdict, reason, other spellings and nativeness that a field maker wrote into `field`."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "windlass" not in extra:
        raise TypeError(f"field {field!r} carries no verdict; declare it with honoured(), accepted() or refused()")
    return cast(dict[str, Any], extra["windlass"])
