"""What a run says about itself: timers, memory, monitors. A rank that is asked nothing pays nothing."""

from __future__ import annotations

from windlass.observe.memory import see_memory_usage as see_memory_usage
from windlass.observe.monitor import Monitor as Monitor
from windlass.observe.timers import Timers as Timers
