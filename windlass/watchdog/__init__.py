"""Why a run does not go on. Reading order: settings, place (where a rank is), record (what it says of itself), board
(where ranks read each other), sight (what one sees of the others), verdict, report, watch (the thread), start."""

from windlass.watchdog.watchdog_limits import WatchdogLimits
from windlass.watchdog.watchdog_start import report_failure, start

__all__ = ["WatchdogLimits", "report_failure", "start"]
