"""Watchdog that detects and explains hangs.

Reading order: watchdog_limits, thread_location (position of a rank), heartbeat (record that a rank publishes),
control_store (exchange of heartbeats), peer_status (state of the other ranks), hang_diagnosis, hang_report,
watchdog_thread, watchdog_start.
"""

from windlass.watchdog.watchdog_limits import WatchdogLimits
from windlass.watchdog.watchdog_start import report_failure, start

__all__ = ["WatchdogLimits", "report_failure", "start"]
