"""Tests of `PollingStore`, which uses the connection of another store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ports import free_port
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.comm.pair_link import PairLink
from windlass.comm.polling_store import PollingStore

LONG = timedelta(seconds=60)


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=LONG)


def test_any_bytes_are_read_as_written() -> None:
    store = PollingStore(tcp_store(), LONG)
    for value in (b"", bytes(range(256)), "text"):
        store.set("key", value)
        assert store.get("key") == (value.encode() if isinstance(value, str) else value)


def test_a_wait_leaves_the_connection_to_others() -> None:
    """While one end of a link waits, others use the same connection to the store: a writer and the other end."""
    bind_gloo_to_loopback()
    store = tcp_store()
    received: list[list[int]] = []

    def first() -> None:
        link = PairLink(PollingStore(store, LONG), "a", first=True, peer="b", connect=LONG)
        received.append(link.receive_header())
        received.append(link.receive(torch.empty(3, dtype=torch.int64)).tolist())

    thread = threading.Thread(target=first)
    thread.start()
    store.set("note", "x")
    assert store.get("note") == b"x" and not received
    other = PairLink(PollingStore(store, LONG), "a", first=False, peer="a", connect=LONG)
    other.send([7], torch.arange(3))
    thread.join(60)
    assert received[0][0] == 7 and received[1] == [0, 1, 2]


def test_a_key_that_will_not_come_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="no process writes the keys absent any more"):
        PollingStore(tcp_store(), LONG, lambda: True).get("absent")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(RuntimeError, match="wait timeout after 0 s, keys: absent"):
        PollingStore(tcp_store(), timedelta(0)).get("absent")
