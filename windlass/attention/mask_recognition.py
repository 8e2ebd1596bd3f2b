"""Recognition of transformers' mask functions, from the closures that `transformers.masking_utils` builds.

transformers describes a mask by a function of sample, head, query and key. Its masks are intersections of a few kinds
of functions, which are recognized by their code objects, without computing the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from windlass.attention.mask_pattern import BIDIRECTIONAL, CAUSAL, ChunkedMask, MaskBand, MaskPattern, MaskPredicate

MaskFunction = Callable[..., Any]


@dataclass
class RecognizedMask:
    """Parts of a mask function; see the attributes of `AttentionMask` of the same names.

    Attributes:
        padding: `[samples, at least kv_offset + kv_length]`.
    """

    pattern: MaskPattern = BIDIRECTIONAL
    sequence_ids: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    padding: torch.Tensor | None = None


def recognize_mask(function: MaskFunction, *, needs_vmap: bool = False) -> RecognizedMask:
    """Decompose a mask function. A function with unknown parts becomes a `MaskPredicate` as a whole.

    Args:
        needs_vmap: `use_vmap` of transformers: True if the function contains one that a caller of transformers passed.
    """
    found = RecognizedMask()
    complete = _collect(function, found)
    if not complete or (found.position_ids is not None and found.sequence_ids is None):
        return RecognizedMask(MaskPredicate(function, needs_vmap))
    return found


def _collect(function: MaskFunction, found: RecognizedMask) -> bool:
    """Add the parts of `function` to `found`; return False if a part, or the combination of parts, is unknown."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return _add_pattern(CAUSAL, found)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):  # missing in older releases
        return True
    kind = _known_codes().get(getattr(function, "__code__", None))
    if kind is None:
        return False
    values = _closure_values(function)
    if kind == "and_masks":
        return all([_collect(part, found) for part in values["mask_functions"]])
    if kind == "or_masks":
        parts = [part for part in values["mask_functions"] if not _allows_nothing(part)]
        return len(parts) == 1 and _collect(parts[0], found)
    if kind == "remap_positions_for_packed_sequence":
        return _set_once(found, "position_ids", values["position_ids"]) and _collect(values["mask_function"], found)
    if kind == "packed_sequence_mask_function":
        return _set_once(found, "sequence_ids", values["packed_sequence_mask"])
    if kind == "padding_mask_function":
        return _set_once(found, "padding", values["padding_mask"])
    if kind == "chunked_overlay":
        return _add_pattern(ChunkedMask(values["chunk_size"], values["left_padding"], BIDIRECTIONAL), found)
    window = values["sliding_window"]
    if kind == "sliding_window_overlay":
        return _add_pattern(MaskBand(None, window - 1), found)
    # transformers' releases differ in whether the window includes its edge
    reach = window if bool(function(0, 0, window, 0)) else window - 1
    return _add_pattern(MaskBand(-reach, reach), found)


def _allows_nothing(function: MaskFunction) -> bool:
    """Return True for an overlay of bidirectional blocks (e.g. of image tokens) if the batch has no such block."""
    if _known_codes().get(getattr(function, "__code__", None)) != "blockwise_overlay":
        return False
    return bool((_closure_values(function)["block_sequence_ids"] < 0).all())


def _set_once(found: RecognizedMask, name: str, value: Any) -> bool:
    if getattr(found, name) is not None:
        return False
    setattr(found, name, value)
    return True


def _add_pattern(pattern: MaskBand | ChunkedMask, found: RecognizedMask) -> bool:
    """Intersect the pattern found so far with `pattern`. Return False if both are chunked: these are not combined."""
    before = found.pattern
    if isinstance(before, MaskBand) and isinstance(pattern, MaskBand):
        found.pattern = before.intersect(pattern)
    elif isinstance(before, MaskBand) and isinstance(pattern, ChunkedMask):
        found.pattern = ChunkedMask(pattern.chunk_size, pattern.left_padding, pattern.band.intersect(before))
    elif isinstance(before, ChunkedMask) and isinstance(pattern, MaskBand):
        found.pattern = ChunkedMask(before.chunk_size, before.left_padding, before.band.intersect(pattern))
    else:
        return False
    return True


def _closure_values(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


_codes: dict[CodeType | None, str] = {}


def _known_codes() -> dict[CodeType | None, str]:
    """Return the code objects of the functions that transformers' factories build, with the names of the factories."""
    from transformers import masking_utils

    if _codes:  # no functools.cache: torch.compile warns of it
        return _codes
    arguments: dict[str, tuple[Any, ...]] = {
        "and_masks": (),
        "or_masks": (),
        "blockwise_overlay": (None,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "chunked_overlay": (1, None),
        "padding_mask_function": (None,),
        "packed_sequence_mask_function": (None,),
        "remap_positions_for_packed_sequence": (None, None),
    }
    for name, values in arguments.items():
        factory = getattr(masking_utils, name, None)
        if factory is not None:  # missing in older releases
            _codes[factory(*values).__code__] = name
    return _codes
