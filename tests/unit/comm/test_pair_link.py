"""Tests of a link of two processes whose other side closes."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.ports import free_port
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.comm.polling_store import PollingStore

LONG = timedelta(seconds=60)


def test_a_send_that_never_ends_does_not_block_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo does not end a send whose write fails because the other side has just closed, but refuses later ones."""
    bind_gloo_to_loopback()
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=LONG)
    links: dict[bool, PairLink] = {}

    def connect(first: bool) -> None:
        links[first] = PairLink(PollingStore(store, LONG), "a", first=first, peer="the other", connect=LONG)

    thread = threading.Thread(target=connect, args=(False,))
    thread.start()
    connect(True)
    thread.join(60)
    waits, ends = threading.Event(), threading.Event()

    class Lost:
        def wait(self, idle: timedelta) -> None:
            waits.set()
            ends.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(PairLink, "_start", lambda *_: Lost())
        stuck = threading.Thread(target=links[True].send, args=([1],))
        stuck.start()
        assert waits.wait(60)
    links[False].close()
    refused = threading.Thread(target=send_until_refused, args=(links[True],))
    refused.start()
    refused.join(30)
    assert not refused.is_alive()
    ends.set()
    stuck.join(60)


def send_until_refused(link: PairLink) -> None:
    """Send messages until the link is closed, which happens soon after the other side closes it."""
    with pytest.raises(LinkClosedError):
        while True:
            link.send([2])
