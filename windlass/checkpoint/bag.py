"""What stands for objects of classes that are not loaded: attributes, and nothing that could run."""

from __future__ import annotations

import re
from typing import Any

from windlass.base.errors import CheckpointError


class Bag:
    """Stands for an object of a class that is not loaded: its attributes, and nothing that could run.

    Attributes:
        given: what its class was called with.
    """

    given: tuple[Any, ...]

    def __new__(cls, *given: Any) -> Bag:
        bag = super().__new__(cls)
        bag.__dict__["given"] = given
        return bag

    def __init__(self, *given: Any) -> None:
        """Nothing: see `__new__`."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # attributes, and slots
            state = {key: value for part in state if isinstance(part, dict) for key, value in part.items()}
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})

    def __reduce__(self) -> Any:
        raise TypeError("a stand-in is not pickled again")


class LossScaler(Bag):
    """Of DeepSpeed: `cur_scale`, and how it moves."""


class ZeroStage(Bag):
    """Of DeepSpeed: a stage's number, in `given`."""


class Namespace(Bag):
    """Of argparse: options as attributes."""


class Array(Bag):
    """Of numpy: what it was saved as, in `saved`."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["saved"] = state

    def made(self) -> Any:
        """The array.

        Raises:
            CheckpointError: it is none of numbers or text, or has not the bytes that its shape needs.
        """
        import numpy

        saved = self.__dict__.get("saved")
        if not isinstance(saved, tuple) or len(saved) != 5:
            raise CheckpointError("an array of numpy was saved without its type, shape and bytes")
        _, shape, kind, by_columns, raw = saved
        code = kind.given[0] if isinstance(kind, Bag) and kind.given else None
        if not isinstance(code, str) or not re.fullmatch("[biufcSU][0-9]+", code) or not isinstance(raw, bytes):
            raise CheckpointError(f"an array of numpy's type {code!r} is neither of numbers nor of text")
        try:
            return numpy.ndarray(shape, code, bytearray(raw), order="F" if by_columns else "C")
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"an array of numpy's type {code!r} and shape {shape!r}: {error}") from None
