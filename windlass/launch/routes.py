"""Where the flags send what ranks write."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from windlass.base.limits import whole_number
from windlass.launch.console import Route
from windlass.launch.devices import parse_numbers
from windlass.launch.errors import LaunchError
from windlass.launch.ranks import ERR, OUT

_STREAMS = {"0": frozenset[str](), "1": frozenset((OUT,)), "2": frozenset((ERR,)), "3": frozenset((OUT, ERR))}


def route_of(args: argparse.Namespace) -> Route:
    """By --log-dir, --redirects, --tee, --local_ranks_filter and --enable_each_rank_log.

    Raises:
        LaunchError: flags that contradict each other, or say no stream.
    """
    shown = (
        frozenset(parse_numbers(args.local_ranks_filter, "--local_ranks_filter")) if args.local_ranks_filter else None
    )
    if args.enable_each_rank_log != "None":
        for name in ("log_dir", "redirects", "tee"):
            if getattr(args, name):
                raise LaunchError(f"--enable_each_rank_log and --{name} together; give one of them")
        directory = Path(args.enable_each_rank_log)
        return Route(directory, time.strftime("%Y%m%d%H%M%S") + "_rank{rank}.log", {-1: _STREAMS["3"]}, shown=shown)
    redirected, teed = _streams(args.redirects, "--redirects"), _streams(args.tee, "--tee")
    if (redirected or teed) and not args.log_dir:
        raise LaunchError(f"--{'redirects' if redirected else 'tee'} needs --log-dir DIR, where the files go")
    if not args.log_dir:
        return Route(shown=shown)
    if not redirected and not teed:
        return Route(Path(args.log_dir), shown=shown)
    ranks = {*redirected, *teed, -1}
    nothing = _STREAMS["0"]
    silent = {
        one: redirected.get(one, redirected.get(-1, nothing)) - teed.get(one, teed.get(-1, nothing)) for one in ranks
    }
    filed = {
        one: redirected.get(one, redirected.get(-1, nothing)) | teed.get(one, teed.get(-1, nothing)) for one in ranks
    }
    return Route(Path(args.log_dir), silent=silent, filed=filed, shown=shown)


def _streams(text: str | None, flag: str) -> dict[int, frozenset[str]]:
    """`3`, or `0:1,1:2`: streams by local rank, -1 for all others."""
    if not text or text == "0":
        return {}
    found = {}
    for part in text.split(","):
        rank, colon, streams = part.rpartition(":")
        if streams not in _STREAMS or (colon and whole_number(rank) is None) or (not colon and "," in text):
            raise LaunchError(f"{flag} {text}: write 0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:THAT,...")
        found[int(rank) if colon else -1] = _STREAMS[streams]
    return found
