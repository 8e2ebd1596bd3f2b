"""Fixtures for the tests of DeepSpeed's clients."""

from __future__ import annotations

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def patience() -> None:
    """Disable pytest's limit of five minutes, which is too short for two runs of a client: `Client.run` has its own."""
    faulthandler.cancel_dump_traceback_later()
