"""Stand-ins for objects of classes that are not loaded: attributes, and nothing that could run."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from windlass.base.errors import CheckpointError


class PickleStandIn:
    """Stand-in for an object of a class that is not loaded.

    Attributes:
        given: arguments that its class was called with.
        attributes: its state.
    """

    __slots__ = ("arguments", "attributes")

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        self.arguments = given
        self.attributes: dict[str, Any] = {}

    def set_state(self, state: Any) -> None:
        """Take a state as a pickle has it: a dictionary of attributes, or one after another of slots.

        Raises:
            ValueError: it is none.
        """
        for part in state if type(state) is tuple else (state,):
            if part is None:
                continue
            if type(part) is not dict or not all(type(key) is str for key in part):
                raise ValueError(f"the state of an object is a {type(part).__name__}")
            self.attributes.update(part)

    def children(self) -> Collection[Any]:
        """All values in it."""
        return [*self.arguments, *self.attributes.values()]

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a stand-in takes no state but by its reader")

    def __reduce__(self) -> Any:
        raise TypeError("a stand-in is not pickled again")


class LossScalerStandIn(PickleStandIn):
    """Of DeepSpeed: `cur_scale`, and how it moves."""

    __slots__ = ()


class ZeroStageStandIn(PickleStandIn):
    """Of DeepSpeed: a stage's number, in `given`."""

    __slots__ = ()


class NamespaceStandIn(PickleStandIn):
    """Of argparse: options as attributes."""

    __slots__ = ()


class NumpyDtypeStandIn(PickleStandIn):
    """Of numpy: an array's type, its code in `given`."""

    __slots__ = ("state",)

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        super().__init__(given)
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Keep the state, which has the order of bytes."""
        self.state = state

    def children(self) -> Collection[Any]:
        """All values in it."""
        return [*self.arguments, self.state]

    def dtype_code(self) -> str:
        """Its kind and size, such as `f8`. Raises CheckpointError where its bytes are in another order than here."""
        order = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "<"
        code = self.arguments[0] if self.arguments else None
        if not isinstance(code, str) or order not in ("<", "|", "="):
            raise CheckpointError(f"numpy's type {code!r:.60} with bytes in the order {order!r:.60} is not read")
        return code


class NumpyArrayStandIn(PickleStandIn):
    """Of numpy: a state that `made` makes an array of."""

    __slots__ = ("state",)

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        super().__init__(given)
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def children(self) -> Collection[Any]:
        """All values in it."""
        return [*self.arguments, self.state]

    def to_numpy(self) -> Any:
        """The array.

        Raises:
            CheckpointError: it is none of numbers or text, or has not the bytes that its shape needs.
        """
        import numpy

        saved = self.state
        if not isinstance(saved, tuple) or len(saved) != 5:
            raise CheckpointError("an array of numpy was saved without its type, shape and bytes")
        _, shape, kind, by_columns, raw = saved
        code = kind.dtype_code() if isinstance(kind, NumpyDtypeStandIn) else ""
        if not re.fullmatch("[biufcSU][0-9]{1,6}", code) or not isinstance(raw, bytes):
            raise CheckpointError(f"an array of numpy's type {code!r} is neither of numbers nor of text")
        try:
            return numpy.ndarray(shape, code, bytearray(raw), order="F" if by_columns else "C")
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"an array of numpy's type {code!r} and shape {shape!r:.100}: {error}") from None
