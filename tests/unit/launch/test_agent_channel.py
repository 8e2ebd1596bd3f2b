"""Tests of the write end of the channel between launcher and node agents."""

from __future__ import annotations

import os

from windlass.launch.agent_channel import MESSAGE_PREFIX, AgentChannel


def test_channel_closes_its_descriptor_once() -> None:
    """The channel closes its descriptor only once, because another file may have its number by a second close."""
    reading, writing = os.pipe()
    channel = AgentChannel(writing)
    channel.send({"a": 1})
    channel.close()
    other = os.open(os.devnull, os.O_RDONLY)
    other = other if other == writing else os.dup2(other, writing)
    channel.close()
    channel.send({"b": 2})
    os.fstat(other)
    os.close(other)
    assert os.read(reading, 100) == MESSAGE_PREFIX + b'{"a": 1}\n'
    os.close(reading)


def test_closed_reader_sets_the_closed_attribute() -> None:
    reading, writing = os.pipe()
    channel = AgentChannel(writing)
    os.close(reading)
    channel.send({"a": 1})
    assert channel.closed
    channel.close()
