"""Fixtures of all tests of clients."""

from __future__ import annotations

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def patience() -> None:
    """Take pytest's limit of five minutes away, which is short for two runs of a client: `Client.run` has its own."""
    faulthandler.cancel_dump_traceback_later()
