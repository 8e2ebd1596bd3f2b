"""Formatting of answers with many log-probabilities in a thread, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from windlass.inference.outputs import RequestOutput

Result = TypeVar("Result")

# The event loop formats 50 to 200 entries a millisecond; above this number, it would delay tokens of other requests.
_MAX_ENTRIES = 2**11

# One thread: several would compete with the engine's thread for the interpreter lock.
_thread = ThreadPoolExecutor(1, "long-answers")


def count_entries(outputs: Iterable[RequestOutput], *, copies: int = 1) -> int:
    """Return the number of log-probabilities in the outputs.

    Args:
        copies: number of answers of an output that show the log-probabilities of its prompt.
    """
    total = 0
    for output in outputs:
        total += copies * sum(len(row) for row in output.prompt_logprobs or () if row)
        total += sum(len(row) for answer in output.outputs for row in answer.logprobs or ())
    return total


async def build_answer(entries: int, build: Callable[[bool], Result]) -> Result:
    """Return the result of `build`, which runs in a thread if it formats many log-probabilities.

    Args:
        entries: number of log-probabilities that `build` formats.
        build: function whose argument is True in a thread; see `is_long` of `encode_json`.
    """
    if entries <= _MAX_ENTRIES:
        return build(False)
    return await asyncio.get_running_loop().run_in_executor(_thread, build, True)
