"""Mutations of files, and the law for every reader of mutated files.

The law: a reader returns the original or another valid value, or raises a WindlassError. It raises nothing
else, does not hang, and takes no more memory than four times the file and a floor. `WINDLASS_FUZZ_SECONDS` is the total
time of all fuzzers of a run, including those of small texts (`texts`); each fuzzer gets a fraction.
`WINDLASS_FUZZ_SEED` seeds the draws; by default the seed is random if the time is set.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from windlass.base.errors import WindlassError

LONG = "WINDLASS_FUZZ_SECONDS" in os.environ
SECONDS = float(os.environ.get("WINDLASS_FUZZ_SECONDS", "8"))
# A short run has the same cases each time: findings of a long run must not fail an unrelated change.
_SHORT = random.SystemRandom().randrange(1, 1 << 31) if LONG else 20261123
SEED = int(os.environ.get("WINDLASS_FUZZ_SEED", "0")) or _SHORT
_OF_CHECKPOINTS = 0.66  # fraction of the total time for checkpoints; `texts` has the other part
FLOOR = 64 << 20  # bytes that a reader may take beyond four times the file's size
PATIENCE = 20  # seconds of computation for one case
WAITS = 10  # factor on PATIENCE for time on the clock, because other processes may use the CPU

Reader = Callable[[], Any]
Mutation = Callable[[random.Random, bytes], bytes]

_NUMBERS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    -5,
    0,
    1,
    10**12,
    10**30,
    1 << 63,
    0.5,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "deep",
    "long",
    "../../etc/passwd",
    "/dev/zero",
    "a\0b",
    "\ud800",
    "__metadata__",
    "F32",
    "I32",
    "nan",
    [],
    {},
    [[]],
    [0],
    [-1],
    [1 << 62, 1 << 62],
    {"$": []},
    {"$": ["tensor", "param/w"]},
    {"$": ["dict", [[[], 1]]]},
    {"$": ["dict", [[{"$": ["set", [[]]]}, 1]]]},
    {"$": [[], {}]},
    {"$": ["float", []]},
    {"$": ["array", ["<f8", [1 << 40], {"$": ["bytes", "00"]}]]},
    {"$": ["namespace", []]},
    {"$": ["object", []]},
    {"$": ["object", ["torch.distributed.device_mesh", "DeviceMesh", {"$": ["tuple", []]}]]},
    {"$": ["bytes", "zz"]},
    {"$": ["dtype", {}]},
)


def flipped_bits(draw: random.Random, data: bytes) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut_short(draw: random.Random, data: bytes) -> bytes:
    """Remove the end, the beginning, or a part in between."""
    first, last = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    return draw.choice((data[:first], data[last:], data[:first] + data[last:]))


def repeated(draw: random.Random, data: bytes) -> bytes:
    """Insert a copy of a part of the file somewhere."""
    first = draw.randrange(len(data))
    part = data[first : first + draw.randint(1, 200)]
    at = draw.randrange(len(data))
    return data[:at] + part * draw.choice((1, 2, 50)) + data[at:]


def edged_number(draw: random.Random, data: bytes) -> bytes:
    """Overwrite 1, 2, 4 or 8 bytes with a number at the edge of its range."""
    width = draw.choice((1, 2, 4, 8))
    at = draw.randrange(max(1, len(data) - width))
    number = draw.choice(_NUMBERS) & ((1 << 8 * width) - 1)
    return data[:at] + number.to_bytes(width, draw.choice(("little", "big"))) + data[at + width :]


def random_bytes(draw: random.Random, data: bytes) -> bytes:
    """Overwrite a part with random bytes."""
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(draw.randint(1, 40)) + data[at + draw.randint(0, 40) :]


BYTES: tuple[Mutation, ...] = (flipped_bits, cut_short, repeated, edged_number, random_bytes)


def as_text(value: Any) -> str:
    """Return a value as JSON. "deep" and "long" in it become deeper nesting and longer numbers than encoders write."""
    try:
        text = json.dumps(value)
    except RecursionError:  # repeated mutations can nest that deep
        text = '"deep"'
    return text.replace('"deep"', "[" * 50_000 + "]" * 50_000).replace('"long"', "9" * 5_000)


def other_values(draw: random.Random, value: Any) -> Any:
    """Return a JSON value with a few places changed."""
    changed = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        changed = _other_value(draw, changed)
    return changed


def _other_value(draw: random.Random, value: Any) -> Any:
    places = list(_places(value))
    if not places:
        return draw.choice(_VALUES)
    holder, key = draw.choice(places)
    old = holder[key]
    action = draw.randrange(6)
    if action == 0 and isinstance(holder, dict):
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[draw.choice(("", "__metadata__", "\ud800", "$", "x", "params"))] = holder.pop(key)
    elif action == 2:
        holder[key] = holder[draw.choice([other for at, other in places if at is holder])]
    elif action == 3 and isinstance(old, int):
        holder[key] = old + draw.choice((-1, 1, 2, -old, 1 << 31, 1 << 62))
    elif action == 4:
        holder[key] = _deep(draw.choice((20, 70, 200)), draw.choice(("list", "dict", "tuple")))
    else:
        holder[key] = draw.choice(_VALUES)
    return value


def _deep(depth: int, kind: str) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value} if kind == "dict" else {"$": ["tuple", [value]]}
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    stack = [value]
    while stack:
        holder = stack.pop()
        keys: Any = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            stack.append(holder[key])


class Hang(BaseException):
    """Timeout of a case, which no exception handler of a reader catches."""


@contextmanager
def time_limit(seconds: int = PATIENCE, what: object = "a case") -> Iterator[None]:
    """Raise Hang if the block computes for `seconds`, or takes ten times as long on the clock."""
    start, computed = time.monotonic(), time.process_time()

    def ring(number: int, frame: FrameType | None) -> None:
        took, used = time.monotonic() - start, time.process_time() - computed
        if used >= seconds or took >= WAITS * seconds:
            raise Hang(f"{took:.0f} s, of which {used:.0f} s of computation, for {what}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    """Limit the process to `nbytes` more than its current memory, also for native code, whose memory is not traced."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def keeps_the_law(read: Reader, nbytes: int, vouched: Callable[[Any], str], *, floor: int = FLOOR) -> str:
    """Run a reader on mutated files. Return how the reader breaks the law, or an empty text.

    Args:
        nbytes: size of all files that the reader reads.
        vouched: function that returns the error in a result, or an empty text.
    """
    tracemalloc.start()
    try:
        with time_limit(), memory_limit(4 * nbytes + (1 << 30)):
            value = read()
    except WindlassError as error:
        return "" if str(error) else "raises an error without a text"
    except Hang as error:
        return f"hangs: {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error!s:.300}"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if peak > 4 * nbytes + floor:
        return f"takes {peak} bytes for a file of {nbytes}"
    return vouched(value)


def fuzz(
    share: float,
    make: Callable[[random.Random], tuple[int, bytes]],
    readers: dict[str, Reader],
    vouched: Callable[[str, Any], str],
    found: Path,
) -> None:
    """Fuzz for `share` of the time of all checkpoint fuzzers. Fail at the first violation, with its case in `found`.

    Args:
        make: function that writes the files of a new case; returns the size of all files, and the mutated bytes.
        readers: readers by name; each of them reads every case.
        vouched: function that returns the error in a reader's result, or an empty text.
        found: file for the mutated bytes of a case that violates the law.
    """
    draw = random.Random(SEED)
    end, cases = time.monotonic() + SECONDS * _OF_CHECKPOINTS * share, 0
    while time.monotonic() < end or not cases:
        state = draw.getstate()
        nbytes, case = make(draw)
        cases += 1
        for name, read in readers.items():
            broken = keeps_the_law(read, nbytes, lambda value, name=name: vouched(name, value))  # type: ignore[misc]
            if broken:
                found.write_bytes(case)
                pytest.fail(
                    f"{name} {broken}; case {cases} of WINDLASS_FUZZ_SEED={SEED}, kept in {found} "
                    f"(draws {hash(state[1]) & 0xFFFF:x})"
                )
    print(f"{cases} cases of seed {SEED}")
