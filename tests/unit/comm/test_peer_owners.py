"""Tests of the owners of connections: another user of the host takes no part in a process group."""

from __future__ import annotations

import ast
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import windlass
from windlass.base.errors import CommunicationError
from windlass.comm import peer_owners
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.comm.peer_owners import (
    ClosedPeerError,
    Connections,
    ForeignPeer,
    foreign_peers,
    have_own_peers,
    open_sockets,
    read_connections,
    require_own_peers,
)
from windlass.comm.socket_diagnosis import Endpoint, SocketDiagnosis, SocketOwner, endpoints

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LITTLE = pytest.mark.skipif(sys.byteorder != "little", reason="the table below is of a little-endian machine")

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(local: str, remote: str, state: str, uid: int, inode: int) -> str:
    return f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid:5d}        0 {inode} 1 0 100\n"


OWN, OTHER = "0100007F:1F90", "0100007F:C350"  # 127.0.0.1:8080 and 127.0.0.1:50000
MAPPED = "0000000000000000FFFF00000100007F:C350"
OUTSIDE = "0101A8C0:0050"  # 192.168.1.1:80
UNACCEPTED = row(OTHER, OWN, "01", 0, 0)


@LITTLE
@pytest.mark.parametrize(
    ("remote", "rows", "expected"),
    [
        (OTHER, [row(OTHER, OWN, "01", 1000, 8)], []),
        (OTHER, [row(OTHER, OWN, "01", 1001, 8)], [1001]),
        (OTHER, [row(MAPPED, f"{MAPPED[:32]}:1F90", "01", 1001, 8)], [1001]),
        (OTHER, [row(OTHER, OWN, "01", 0, 8)], []),  # the superuser is accepted
        (OTHER, [row(OTHER, OWN, "06", 0, 0)], [None]),  # closed: no process owns the other end
        (OTHER, [UNACCEPTED], [None]),
        (OTHER, [row(OTHER, OWN, "0A", 1000, 8)], [None]),
        (OTHER, [], [None]),
        (OUTSIDE, [], []),
    ],
)  # fmt: skip
def test_the_owner_of_the_other_end_decides(
    remote: str, rows: list[str], expected: list[int | None], tmp_path: Path
) -> None:
    table = tmp_path / "tcp"
    table.write_text("".join([HEAD, row(OWN, remote, "01", 1000, 7), *rows, row("0100007F:0001", OWN, "01", 1002, 9)]))
    found = foreign_peers({7}, read_connections([str(table)]))
    assert [peer.uid for peer in found] == expected
    assert all(peer.local == "127.0.0.1:8080" and peer.remote == "127.0.0.1:50000" for peer in found)
    assert [peer.is_queued for peer in found] == [rows == [UNACCEPTED]] * len(found)


@LITTLE
def test_both_kinds_of_addresses_are_readable() -> None:
    last = f"{'0' * 24}01000000"  # ::1
    connections = {(f"{last}:0001", f"{last}:0002"): SocketOwner(1000, 7)}
    assert foreign_peers({7}, connections) == [ForeignPeer("[::1]:1", "[::1]:2", None)]


@LINUX
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_one_connection_is_looked_up_as_the_table_lists_it(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    before = open_sockets()
    with socket.socket(family) as listener, socket.socket(family) as ours:
        listener.bind((address, 0))
        listener.listen()
        ours.connect(listener.getsockname())
        opened = {inode: descriptor for inode, descriptor in open_sockets().items() if inode not in before}
        assert len(opened) == 2
        assert not have_own_peers(opened)  # no process has accepted the connection
        theirs = listener.accept()[0]
        assert have_own_peers(opened) and not foreign_peers(opened, read_connections())
        with SocketDiagnosis() as kernel:
            ends = endpoints(ours.fileno())
            assert ends is not None and endpoints(listener.fileno()) is None
            assert kernel.owner(*ends) == SocketOwner(os.getuid(), os.fstat(ours.fileno()).st_ino)
            assert kernel.owner(*reversed(ends)) == SocketOwner(os.getuid(), os.fstat(theirs.fileno()).st_ino)
            assert kernel.owner(ends[1], (ends[0][0], 1)) is None  # no connection has port 1; a listener does not count
        theirs.close()
        assert not have_own_peers(opened)
        ours.close()
        assert not have_own_peers(opened)  # the peer of a closed descriptor is unknown


@LINUX
def test_the_table_decides_where_sockets_cannot_be_looked_up(
    connect: Callable[[], tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SocketDiagnosis) -> None:
        raise PermissionError("a container without netlink")

    monkeypatch.setattr(SocketDiagnosis, "__init__", refuse)
    with require_own_peers("of a test"):
        connect()
    with pytest.raises(ClosedPeerError), require_own_peers("of a test"):
        connect()[1].close()


@pytest.mark.parametrize("accepted", [True, False])
def test_a_thread_that_did_not_run_until_the_limit_looks_once_more(
    accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, queued = [0.0], ForeignPeer("127.0.0.1:1", "127.0.0.1:2", None, is_queued=True)

    def look(*_: object) -> list[ForeignPeer]:
        looks.append(looks[-1] + 100)  # this thread is suspended for 100 s
        return [] if accepted and len(looks) > 2 else [queued]

    monkeypatch.setattr(peer_owners, "have_own_peers", lambda _: False)
    monkeypatch.setattr(peer_owners, "foreign_peers", look)
    monkeypatch.setattr(peer_owners, "time", SimpleNamespace(monotonic=lambda: looks[-1], sleep=lambda _: None))
    with ExitStack() as stack:
        if not accepted:
            stack.enter_context(pytest.raises(ClosedPeerError))
        with require_own_peers("of a test", accept_s=2.0):
            pass
    assert len(looks) == 3


@pytest.fixture
def connect() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Return a function that makes a connection over loopback and returns both ends."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connected() -> tuple[socket.socket, socket.socket]:
            ours = stack.enter_context(socket.create_connection(listener.getsockname()))
            return ours, stack.enter_context(listener.accept()[0])

        yield connected


@LINUX
def test_connections_of_this_user_are_accepted_and_closed_ones_refused(
    connect: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    connect()[1].close()  # a connection from before the context is not checked
    with require_own_peers("of a test"):
        connect()
    with pytest.raises(ClosedPeerError, match="of a test, is held by no process"), require_own_peers("of a test"):
        connect()[1].close()


@LINUX
@pytest.mark.parametrize("diagnosis", [True, False])
def test_a_connection_that_is_accepted_late_is_waited_for(diagnosis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not diagnosis:
        monkeypatch.setattr(peer_owners, "have_own_peers", lambda opened: False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []
        # `require_own_peers` refuses a closed connection after 0.2 s, and waits longer for one that is not accepted.
        late = threading.Timer(0.5, lambda: accepted.append(listener.accept()[0]))
        with require_own_peers("of a test"):
            connected = [socket.create_connection(listener.getsockname())]
            late.start()
        late.join()
        assert len(accepted) == 1
        with pytest.raises(ClosedPeerError), require_own_peers("of a test", accept_s=0.1):
            connected.append(socket.create_connection(listener.getsockname()))
        for one in connected + accepted:
            one.close()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return a list of one uid, to which one end of each connection appears to belong; None: to no process."""
    owner: list[int | None] = [None]

    def read() -> Connections:
        found = read_connections()
        for (local, remote), own in list(found.items()):
            if local > remote:
                found[local, remote] = SocketOwner(own.uid, 0) if owner[0] is None else SocketOwner(owner[0], own.inode)
        return found

    def look_up(self: SocketDiagnosis, local: Endpoint, remote: Endpoint) -> SocketOwner | None:
        own = find(self, local, remote)
        if own is None or local <= remote:
            return own
        return SocketOwner(own.uid, 0) if owner[0] is None else SocketOwner(owner[0], own.inode)

    find = SocketDiagnosis.owner
    monkeypatch.setattr(SocketDiagnosis, "owner", look_up)
    monkeypatch.setattr(peer_owners, "read_connections", read)
    monkeypatch.setattr(peer_owners, "_PAUSE_S", 0.0)
    return owner


@LINUX
@pytest.mark.parametrize(("owner", "kind"), [(12345, CommunicationError), (None, LinkClosedError)])
def test_a_link_with_a_stranger_is_refused(
    owner: int | None, kind: type[Exception], stranger: list[int | None]
) -> None:
    stranger[0] = owner
    bind_gloo_to_loopback()
    store, wait, errors = dist.HashStore(), timedelta(seconds=60), []
    links: list[PairLink] = []  # both ends stay open until both are checked

    def link(first: bool) -> None:
        try:
            links.append(PairLink(store, "a", first=first, peer="the other", connect=wait))
        except CommunicationError as error:
            errors.append(error)

    threads = [threading.Thread(target=link, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors and type(errors[0]) is kind  # the other end may report only the closed connection
    if owner is not None:
        assert "made for a link with the other, belongs to uid 12345" in str(errors[0])


def test_process_groups_are_created_in_one_place() -> None:
    package = Path(windlass.__file__).parent
    creators = {"new_group", "init_process_group", "ProcessGroupGloo"}
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "distributed" in text and any(name in text for name in creators):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Attribute) and node.attr in creators and ast.unparse(node.value) == "dist":
                    found.add(path.relative_to(package).as_posix())
    assert found == {"comm/group_creation.py", "comm/pair_link.py"}
