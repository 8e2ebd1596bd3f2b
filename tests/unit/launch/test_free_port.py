"""Tests of the choice of a port for the rendezvous of local ranks."""

from __future__ import annotations

import pytest

from windlass.launch import local_launch


def test_free_ports_are_not_ephemeral_unless_all_others_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {local_launch.free_port() for _ in range(5)}
    assert len(ports) > 1 and all(20_000 <= port < 32_000 for port in ports)
    monkeypatch.setattr(local_launch, "is_port_free", lambda port: False)
    assert not 20_000 <= local_launch.free_port() < 32_000
