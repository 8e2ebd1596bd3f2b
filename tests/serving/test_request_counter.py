"""Tests of the count of requests in progress."""

from __future__ import annotations

import asyncio

from windlass.serving.request_counter import RequestCounter


def test_wait_until_idle_with_timeout_0() -> None:
    async def wait(running: int) -> bool:
        counter = RequestCounter()
        for _ in range(running):
            counter.enter()
        return await counter.wait_until_idle(0)

    assert asyncio.run(wait(0))
    assert not asyncio.run(wait(1))
