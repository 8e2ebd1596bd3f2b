"""Tests of a link of two processes whose other side closes."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ports import free_port
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.comm.polling_store import PollingStore

LONG = timedelta(seconds=60)


def connected() -> tuple[PairLink, PairLink]:
    bind_gloo_to_loopback()
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=LONG)
    links: dict[bool, PairLink] = {}

    def connect(first: bool) -> None:
        links[first] = PairLink(PollingStore(store, LONG), "a", first=first, peer="the other", connect=LONG)

    thread = threading.Thread(target=connect, args=(False,))
    thread.start()
    connect(True)
    thread.join(60)
    return links[True], links[False]


def test_a_heartbeat_that_never_ends_does_not_block_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo may never end a heartbeat's send if the other side has just closed. Later sends must still be refused."""
    link, other = connected()
    waits, ends = threading.Event(), threading.Event()

    class Lost:
        def wait(self, idle: timedelta) -> None:
            waits.set()
            ends.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(PairLink, "_start", lambda *_: Lost())
        stuck = threading.Thread(target=link.send_heartbeat, args=([1],))
        stuck.start()
        assert waits.wait(60)
    other.close()
    refused = threading.Thread(target=send_until_refused, args=(link,))
    refused.start()
    refused.join(30)
    assert not refused.is_alive()
    ends.set()
    stuck.join(60)


def test_a_heartbeat_does_not_wait_for_a_message() -> None:
    """A waiting heartbeat could reach its time limit during a long message; gloo then ends all sends of the link."""
    link, other = connected()
    link.idle = timedelta(seconds=2)
    values = torch.arange(3)
    sending = threading.Thread(target=link.send, args=([1], values))
    sending.start()
    while link._sending.acquire(blocking=False):  # until the message is being sent
        link._sending.release()
    link.send_heartbeat([2])
    assert other.receive_header()[0] == 1 and other.receive(torch.empty_like(values)).equal(values)
    sending.join(60)
    beating = threading.Thread(target=link.send_heartbeat, args=([3],))
    beating.start()
    assert other.receive_header()[0] == 3
    beating.join(60)


def test_a_tensor_of_one_element_has_any_stride() -> None:
    link, other = connected()
    sent, received = torch.arange(4.0)[1::4], torch.zeros(8)[::8]
    sending = threading.Thread(target=link.send, args=([1], sent))
    sending.start()
    assert sent.stride() == (4,) and other.receive_header()[0] == 1 and other.receive(received).item() == 1.0
    sending.join(60)


def send_until_refused(link: PairLink) -> None:
    """Send messages until the link is closed, which happens soon after the other side closes it."""
    with pytest.raises(LinkClosedError):
        while True:
            link.send([2])
