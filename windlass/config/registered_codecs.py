"""Names of the codecs that keys of the configuration may choose.

`windlass.comm.codec.register_codec` adds a name here. Kept apart from `windlass.comm`, because the configuration is
checked below it and without torch. `windlass check` runs no user code, so it accepts the built-in names alone.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_needs_error_feedback: dict[str, bool] = {
    **dict.fromkeys(("identity", "bf16", "fp8", "int8", "int4"), False),
    **dict.fromkeys(("sign", "fine_sign", "topk", "lowrank"), True),
}


def add_codec(name: str, *, needs_error_feedback: bool) -> None:
    """Add a codec; the name is free, or its codec is registered again, which the caller checks."""
    _needs_error_feedback[name] = needs_error_feedback


def codec_names() -> KeysView[str]:
    """Return a view of the names of all codecs; it contains those that are registered later, too."""
    return _needs_error_feedback.keys()


def quantizing_codec_names() -> list[str]:
    """Return the names of the codecs that need no error feedback, sorted."""
    return sorted(name for name, needs in _needs_error_feedback.items() if not needs)


def _require_quantizing(name: str) -> str:
    if name not in _needs_error_feedback:
        reason = "input should be the name of a registered codec"
    elif _needs_error_feedback[name]:
        reason = (
            "input should be a codec that needs no error feedback, because no later message corrects gathered weights "
            "and errors of gradients decay"
        )
    else:
        return name
    names = ", ".join(quantizing_codec_names())
    raise PydanticCustomError(
        "codec",
        "{reason}: {names}, or one that windlass.comm.codec.register_codec added",
        {"reason": reason, "names": names},
    )


QuantizingCodec = Annotated[
    str,
    AfterValidator(_require_quantizing),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": quantizing_codec_names()}, {"type": "string"}]}),
]
"""Name of a codec of ZeRO++'s messages. Editors offer the built-in names and accept others."""
