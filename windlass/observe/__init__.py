"""Timers, memory figures and monitor writers of a run. Disabled ones cost nothing."""

from __future__ import annotations

from windlass.observe.memory_usage import see_memory_usage as see_memory_usage
from windlass.observe.monitor_writers import RunMonitor as RunMonitor
from windlass.observe.phase_timers import Timers as Timers
