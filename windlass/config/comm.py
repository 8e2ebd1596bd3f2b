"""How ranks talk to each other, and the log of what they said."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.section import Section
from windlass.config.verdict import honoured, refused


class Comm(Section):
    """The transport of the core's collectives."""

    transport: Literal["auto", "shm", "gloo", "nccl"] = honoured("auto", native=True)
    """shm: CPU ranks of one host through shared memory; gloo; nccl; auto picks the fastest that works everywhere.
    The environment variable WINDLASS_TRANSPORT overrides it."""


class CommsLogger(Section):
    """A log line for every collective."""

    refusal = "not yet built: the log of single collectives; engine.report() counts their bytes; write false"
    switch = "enabled"

    enabled: bool = refused(False, "")
    prof_all: bool = refused(True, "")
    prof_ops: list[Any] = refused(list, "")
    verbose: bool = refused(False, "")
    debug: bool = refused(False, "")
