"""Stand-ins for objects in pickles whose classes are not loaded. They hold attributes and run no code."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from windlass.base.errors import CheckpointError


class PickleStandIn:
    """Stand-in for an object of a class that is not loaded.

    Attributes:
        arguments: arguments that the class was called with.
        attributes: state of the object.
    """

    __slots__ = ("arguments", "attributes")

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        self.arguments = given
        self.attributes: dict[str, Any] = {}

    def set_state(self, state: Any) -> None:
        """Set the state from a pickle: a dictionary of attributes, or a tuple of two dictionaries, of attributes and
        of slots, each of which may be None.

        Raises:
            ValueError: the value is not a state.
        """
        for part in state if type(state) is tuple else (state,):
            if part is None:
                continue
            if type(part) is not dict or not all(type(key) is str for key in part):
                raise ValueError(f"the state of an object is a {type(part).__name__}")
            self.attributes.update(part)

    def children(self) -> Collection[Any]:
        """Return the values that the object contains."""
        return [*self.arguments, *self.attributes.values()]

    def __setstate__(self, state: Any) -> None:
        raise TypeError("only the reader sets the state of a stand-in")

    def __reduce__(self) -> Any:
        raise TypeError("a stand-in is not pickled again")


class LossScalerStandIn(PickleStandIn):
    """Stand-in for DeepSpeed's loss scaler; `attributes` holds `cur_scale` and the scaler's settings."""

    __slots__ = ()


class ZeroStageStandIn(PickleStandIn):
    """Stand-in for DeepSpeed's stage enum; `arguments` holds the number."""

    __slots__ = ()


class NamespaceStandIn(PickleStandIn):
    """Stand-in for `argparse.Namespace`; `attributes` holds the options."""

    __slots__ = ()


class NumpyDtypeStandIn(PickleStandIn):
    """Stand-in for a numpy dtype; `arguments` holds its code."""

    __slots__ = ("state",)

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        super().__init__(given)
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Store the state, which includes the byte order."""
        self.state = state

    def children(self) -> Collection[Any]:
        """Return the values that the object contains."""
        return [*self.arguments, self.state]

    def dtype_code(self) -> str:
        """Return kind and size, such as `f8`. Raises CheckpointError if the byte order is not little-endian."""
        order = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "<"
        code = self.arguments[0] if self.arguments else None
        if not isinstance(code, str) or order not in ("<", "|", "="):
            raise CheckpointError(
                f"numpy's type {code!r:.60} with byte order {order!r:.60} is not supported; save it as little-endian"
            )
        return code


class NumpyArrayStandIn(PickleStandIn):
    """Stand-in for a numpy array. `to_numpy` builds the array from its state."""

    __slots__ = ("state",)

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        super().__init__(given)
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        """Store the state: a tuple of version, shape, dtype, True for column-major order, and bytes."""
        self.state = state

    def children(self) -> Collection[Any]:
        """Return the values that the object contains."""
        return [*self.arguments, self.state]

    def to_numpy(self) -> Any:
        """Return the array.

        Raises:
            CheckpointError: the object is not an array of numbers or text, or its bytes do not match its shape.
        """
        import numpy

        saved = self.state
        if not isinstance(saved, tuple) or len(saved) != 5:
            raise CheckpointError("an array of numpy lacks its type, shape or bytes; save the file again")
        _, shape, kind, by_columns, raw = saved
        code = kind.dtype_code() if isinstance(kind, NumpyDtypeStandIn) else ""
        if not re.fullmatch("[biufcSU][0-9]{1,6}", code) or not isinstance(raw, bytes):
            raise CheckpointError(
                f"an array of numpy's type {code!r} contains neither numbers nor text; save it as a list"
            )
        try:
            return numpy.ndarray(shape, code, bytearray(raw), order="F" if by_columns else "C")
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"an array of numpy's type {code!r} and shape {shape!r:.100}: {error}") from None
