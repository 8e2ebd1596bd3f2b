"""Id of an HTTP request, which its answer and the log have in common."""

from __future__ import annotations

import re
import uuid

_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


def request_id_of(sent: str) -> str:
    """Return the id that the client sent, or a new one if it sent none or one that is not safe to log.

    Args:
        sent: value of the header `x-request-id`; empty without one.
    """
    return sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
