"""Mutations of small text files, and the law for every reader of them.

Law: a reader returns, or raises a `WindlassError` with printable text, within seconds and without much more memory than
the file takes. If the time of a run is set (`mutations.SECONDS`), each test gets a fraction of the time; otherwise
each test has a fixed number of mutations.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import LONG, SECONDS, SEED, time_limit
from windlass.base.errors import WindlassError
from windlass.base.text import escape_unprintable

MOST_TEXT = 20_000
SHARE = 0.02
"""Fraction of the total fuzzing time for each loop over mutations of a text."""

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

ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        10**30,
        -(10**30),
        0.5,
        -0.5,
        1e308,
        5e-324,
        "",
        "x",
        "\0",
        "\x1b[31m",
    ),
    *("\U0001f600", "a" * 3000, [], [None], [[]], [[[]]], {}, {"": None}, {"a": {"b": [1]}}, ["a", 1], [True], [1.5]),
    *({"type": "function"}, {"type": "json_schema", "json_schema": {}}, [{"role": "user"}], {"$ref": "#"}),
)


def replace_somewhere(data: dict[str, Any], draw: random.Random) -> None:
    """Replace one or two values of a JSON object, perhaps deep inside, by odd values."""
    for _ in range(draw.choice((1, 1, 2))):
        place: Any = data
        while True:
            key: Any = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.6:
                place = place[key]
                continue
            place[key] = draw.choice(ODD_VALUES)
            break


def mutants(seeds: Sequence[bytes], count: int) -> Iterator[bytes]:
    """Yield the seeds, then `count` mutations of them, or the number that fits into the share of a timed run."""
    yield from seeds
    draw = random.Random(SEED)
    end = time.monotonic() + SECONDS * SHARE
    done = 0
    while time.monotonic() < end if LONG else done < count:
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            _mutate(data, draw, seeds)
        done += 1
        yield bytes(data)


def examples(count: int, per_second: int) -> int:
    """Return the number of examples of a hypothesis test: `count`, or more if its share of a timed run allows more."""
    return max(count, int(SECONDS * SHARE * per_second)) if LONG else count


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


def outcome(read: Callable[..., Any], *given: Any) -> Any:
    """Return the result of `read(*given)` or its WindlassError, and check that the error's text is printable and short.

    Any other exception fails the test, with the input (for a path, the file's bytes) in its notes.
    """
    try:
        with time_limit(what=repr(given)[:200]):
            return read(*given)
    except WindlassError as error:
        text = str(error)
        assert text == escape_unprintable(text), (given, text)
        assert len(text) < MOST_TEXT, (repr(given)[:300], len(text), text[:300])
        return error
    except BaseException as error:
        shown = [item.read_bytes() if isinstance(item, Path) and item.is_file() else item for item in given]
        error.add_note(f"input: {shown!r}"[:4000])
        raise


def peak_memory(read: Callable[..., Any], *given: Any) -> int:
    """Return the peak of Python's memory in bytes during `outcome(read, *given)`."""
    tracemalloc.start()
    try:
        outcome(read, *given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
