"""Mutations of small text files, and the law that every reader of them has to keep under each.

Law: a reader returns, or raises a `WindlassError` with printable text; within seconds, and without much more memory
than the file takes. `WINDLASS_FUZZ_SECONDS` is the time for each test; without it each runs a fixed number of
mutations.
"""

from __future__ import annotations

import os
import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from windlass.base.errors import WindlassError
from windlass.base.text import printable

SECONDS = float(os.environ.get("WINDLASS_FUZZ_SECONDS", "0"))
MOST_TEXT = 20_000
LONGEST_S = 10
"""A reader that takes longer hangs; a loaded machine is slow by a factor of a few, not of a thousand."""

ODD = (
    *(
        b"",
        b"\0",
        b"\x1b[2J\x1b]0;owned\x07",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xc2\x9b31m",
        b"\xe2\x80\xae",
        b"\\ud800",
    ),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 30, b"9" * 5000, b"1e-999", b"null", b"true", b'""', b"[]"),
    *(b"{}", b"[" * 5000, b'{"a":' * 5000, b"'''", b"//", b"/*", b"#", b",", b":", b'"', b"'", b"\\", b"\r", b"\n"),
    *(b'"auto"', b'"_comment": 1,', b'"\\u001b[31m": 1,', b"\xf0\x9f\x9a\x80", b" " * 3000, b"=", b"@", b"slots="),
)


def mutants(seeds: Sequence[bytes], count: int, seed: int = 0) -> Iterator[bytes]:
    """The seeds themselves, then mutations of them: `count`, or for `WINDLASS_FUZZ_SECONDS`."""
    yield from seeds
    draw = random.Random(time.time_ns() if SECONDS else seed)
    end = time.monotonic() + SECONDS
    done = 0
    while time.monotonic() < end if SECONDS else done < count:
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            _mutate(data, draw, seeds)
        done += 1
        yield bytes(data)


def _mutate(data: bytearray, draw: random.Random, seeds: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 2, 4, 16, 64)))
    kind = draw.randrange(8)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << draw.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = draw.randrange(256)
    elif kind == 2:
        del data[at:end]
    elif kind == 3:
        data[at:at] = data[at:end] * draw.choice((1, 2, 50))
    elif kind == 4:
        data[at:end] = draw.choice(ODD)
    elif kind == 5:
        data[at:at] = draw.choice(ODD)
    elif kind == 6:
        del data[at:]
    else:
        other = draw.choice(seeds)
        data[at:end] = other[draw.randrange(len(other) + 1) :][:64]


@contextmanager
def in_time(what: object) -> Iterator[None]:
    """Fail where the body takes longer than `LONGEST_S`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"more than {LONGEST_S} s for {what!r}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(read: Callable[..., Any], *given: Any) -> Any:
    """What `read(*given)` returns, or its WindlassError, whose text is held to be printable and short.

    Any other exception is the test's failure, with the input (of a path, the file's bytes) in its notes.
    """
    try:
        with in_time(repr(given)[:200]):
            return read(*given)
    except WindlassError as error:
        text = str(error)
        assert text == printable(text), (given, text)
        assert len(text) < MOST_TEXT, (repr(given)[:300], len(text), text[:300])
        return error
    except BaseException as error:
        shown = [one.read_bytes() if isinstance(one, Path) and one.is_file() else one for one in given]
        error.add_note(f"input: {shown!r}"[:4000])
        raise


def peak_memory(read: Callable[..., Any], *given: Any) -> int:
    """Bytes that Python allocated at most in `outcome(read, *given)`."""
    tracemalloc.start()
    try:
        outcome(read, *given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
