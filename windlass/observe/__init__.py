"""Timers, memory usage, FLOP profiles, monitor writers and records of a run, and facts of the machine.

Disabled timers and writers cost nothing.
"""

from __future__ import annotations

from windlass.observe.memory_usage import see_memory_usage as see_memory_usage
from windlass.observe.monitor_writers import RunMonitor as RunMonitor
from windlass.observe.phase_timers import Timers as Timers
