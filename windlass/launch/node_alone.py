"""The ranks of one host, started by pdsh: `python -m windlass.launch.node_alone NODE PLAN`.

Nothing is said to it; who reads what it writes is all that it knows. When nobody does any more, its ranks end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from dataclasses import replace

from windlass.base.errors import WindlassError
from windlass.base.text import say
from windlass.launch.conduct import Events
from windlass.launch.console import Console, Route
from windlass.launch.local import start_here
from windlass.launch.plan import Plan
from windlass.launch.scheduled import decode


def main(node: int, plan: Plan) -> int:
    """Start the ranks of the host number `node`; the exit code."""
    if plan.cwd is not None:
        os.chdir(plan.cwd)
    plan = replace(plan, node=node)
    places = {place.rank: place for place in plan.places(node)}
    console = Console(Route(), lambda rank: f"[rank {rank}] ", lambda rank: places[rank].local_rank)
    threading.Thread(target=_end_unread, name="windlass-reader", daemon=True).start()
    outcome = start_here(plan, Events(console, [host.name for host in plan.hosts for _ in host.slots]))
    for failure in outcome.failures:
        say(f"windlass run: {failure}", to_stderr=True)
    return outcome.code


def _end_unread() -> None:
    poll = select.poll()
    poll.register(1, 0)  # errors and hang-ups are told unasked
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1]), decode(sys.argv[2])))
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(1)
