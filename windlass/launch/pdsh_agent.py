"""Ranks of one host, started by pdsh: `python -m windlass.launch.pdsh_agent NODE PLAN`.

The process receives no messages. When the reader of its output is gone, it ends its ranks.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from dataclasses import replace

from windlass.base.errors import WindlassError
from windlass.base.text import print_escaped
from windlass.launch.external_rank import decode_plan
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.local_launch import start_local_ranks
from windlass.launch.rank_output import OutputRouting, RankConsole
from windlass.launch.supervisor import RankEvents


def main(node: int, plan: LaunchPlan) -> int:
    """Start the ranks of host number `node`. Return the exit code."""
    if plan.cwd is not None:
        os.chdir(plan.cwd)
    plan = replace(plan, node_rank=node)
    places = {place.rank: place for place in plan.rank_placements(node)}
    console = RankConsole(OutputRouting(), lambda rank: f"[rank {rank}] ", lambda rank: places[rank].local_rank)
    threading.Thread(target=_terminate_when_unread, name="windlass-reader", daemon=True).start()
    hosts = [host.name for host in plan.hosts for _ in host.slots]
    outcome = start_local_ranks(plan, RankEvents(console, hosts, plan.workers))
    for failure in outcome.failures:
        print_escaped(f"windlass run: {failure}", to_stderr=True)
    return outcome.exit_code


def _terminate_when_unread() -> None:
    poll = select.poll()
    poll.register(1, 0)  # error and hang-up events are reported without being requested
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1]), decode_plan(sys.argv[2])))
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(1)
