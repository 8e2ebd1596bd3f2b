"""Why a run does not go on. Reading order: settings, place (where a rank is), record (what it says of itself), board
(where ranks read each other), sight (what one sees of the others), verdict, report, watch (the thread), start."""

from windlass.watchdog.settings import Limits
from windlass.watchdog.start import failed, start

__all__ = ["Limits", "failed", "start"]
