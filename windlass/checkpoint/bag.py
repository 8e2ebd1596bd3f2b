"""Stand-ins for objects of classes that are not loaded: attributes, and nothing that could run."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from windlass.base.errors import CheckpointError


class Bag:
    """Stand-in for an object of a class that is not loaded.

    Attributes:
        given: arguments that its class was called with.
        attributes: its state.
    """

    __slots__ = ("attributes", "given")

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        self.given = given
        self.attributes: dict[str, Any] = {}

    def take(self, state: Any) -> None:
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

    def parts(self) -> Collection[Any]:
        """All values in it."""
        return [*self.given, *self.attributes.values()]

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a stand-in takes no state but by its reader")

    def __reduce__(self) -> Any:
        raise TypeError("a stand-in is not pickled again")


class LossScaler(Bag):
    """Of DeepSpeed: `cur_scale`, and how it moves."""

    __slots__ = ()


class ZeroStage(Bag):
    """Of DeepSpeed: a stage's number, in `given`."""

    __slots__ = ()


class Namespace(Bag):
    """Of argparse: options as attributes."""

    __slots__ = ()


class NumpyType(Bag):
    """Of numpy: an array's type, its code in `given`."""

    __slots__ = ("state",)

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        super().__init__(given)
        self.state: Any = None

    def take(self, state: Any) -> None:
        """Keep the state, which has the order of bytes."""
        self.state = state

    def parts(self) -> Collection[Any]:
        """All values in it."""
        return [*self.given, self.state]

    def code(self) -> str:
        """Its kind and size, such as `f8`. Raises CheckpointError where its bytes are in another order than here."""
        order = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "<"
        code = self.given[0] if self.given else None
        if not isinstance(code, str) or order not in ("<", "|", "="):
            raise CheckpointError(f"numpy's type {code!r:.60} with bytes in the order {order!r:.60} is not read")
        return code


class Array(Bag):
    """Of numpy: a state that `made` makes an array of."""

    __slots__ = ("saved",)

    def __init__(self, given: tuple[Any, ...] = ()) -> None:
        super().__init__(given)
        self.saved: Any = None

    def take(self, state: Any) -> None:
        """Keep the state."""
        self.saved = state

    def parts(self) -> Collection[Any]:
        """All values in it."""
        return [*self.given, self.saved]

    def made(self) -> Any:
        """The array.

        Raises:
            CheckpointError: it is none of numbers or text, or has not the bytes that its shape needs.
        """
        import numpy

        saved = self.saved
        if not isinstance(saved, tuple) or len(saved) != 5:
            raise CheckpointError("an array of numpy was saved without its type, shape and bytes")
        _, shape, kind, by_columns, raw = saved
        code = kind.code() if isinstance(kind, NumpyType) else ""
        if not re.fullmatch("[biufcSU][0-9]{1,6}", code) or not isinstance(raw, bytes):
            raise CheckpointError(f"an array of numpy's type {code!r} is neither of numbers nor of text")
        try:
            return numpy.ndarray(shape, code, bytearray(raw), order="F" if by_columns else "C")
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"an array of numpy's type {code!r} and shape {shape!r:.100}: {error}") from None
