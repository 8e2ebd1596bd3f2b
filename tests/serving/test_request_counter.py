"""Tests of the count of requests in progress."""

from __future__ import annotations

import asyncio

from windlass.serving.request_counter import RequestCounter


def test_an_idle_server_needs_no_time_to_be_idle() -> None:
    async def wait(running: int) -> bool:
        counter = RequestCounter()
        for _ in range(running):
            counter.enter()
        return await counter.wait_until_idle(0)

    assert asyncio.run(wait(0))
    assert not asyncio.run(wait(1))
