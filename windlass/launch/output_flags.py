"""Flags that choose where the output of ranks goes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from windlass.base.bounded_input import parse_int
from windlass.launch.launch_errors import LaunchError
from windlass.launch.rank_output import OutputRouting
from windlass.launch.rank_processes import ERR, OUT
from windlass.launch.visible_devices import parse_numbers

_STREAMS_BY_DIGIT = {"0": frozenset[str](), "1": frozenset((OUT,)), "2": frozenset((ERR,)), "3": frozenset((OUT, ERR))}


def output_routing_from_args(args: argparse.Namespace) -> OutputRouting:
    """Build the routing from --log-dir, --redirects, --tee, --local_ranks_filter and --enable_each_rank_log.

    Raises:
        LaunchError: flags contradict each other, a value cannot be parsed, or `--log-dir` is missing.
    """
    shown = (
        frozenset(parse_numbers(args.local_ranks_filter, "--local_ranks_filter")) if args.local_ranks_filter else None
    )
    if args.enable_each_rank_log != "None":
        for name in ("log_dir", "redirects", "tee"):
            if getattr(args, name):
                raise LaunchError(f"--enable_each_rank_log and --{name} together; give one of them")
        directory = Path(args.enable_each_rank_log)
        return OutputRouting(
            directory,
            time.strftime("%Y%m%d%H%M%S") + "_rank{rank}.log",
            {-1: _STREAMS_BY_DIGIT["3"]},
            shown_local_ranks=shown,
        )
    redirected, teed = _parse_streams(args.redirects, "--redirects"), _parse_streams(args.tee, "--tee")
    if (redirected or teed) and not args.log_dir:
        raise LaunchError(f"--{'redirects' if redirected else 'tee'} needs --log-dir DIR, the folder of the files")
    if not args.log_dir:
        return OutputRouting(shown_local_ranks=shown)
    if not redirected and not teed:
        return OutputRouting(Path(args.log_dir), shown_local_ranks=shown)
    ranks = {*redirected, *teed, -1}
    nothing = _STREAMS_BY_DIGIT["0"]
    silent = {
        one: redirected.get(one, redirected.get(-1, nothing)) - teed.get(one, teed.get(-1, nothing)) for one in ranks
    }
    filed = {
        one: redirected.get(one, redirected.get(-1, nothing)) | teed.get(one, teed.get(-1, nothing)) for one in ranks
    }
    return OutputRouting(Path(args.log_dir), file_only_streams=silent, file_streams=filed, shown_local_ranks=shown)


def _parse_streams(text: str | None, flag: str) -> dict[int, frozenset[str]]:
    """Parse `3`, or `0:1,1:2`, into streams by local rank, with -1 for all other ranks."""
    if not text or text == "0":
        return {}
    found = {}
    for part in text.split(","):
        rank, colon, streams = part.rpartition(":")
        if streams not in _STREAMS_BY_DIGIT or (colon and parse_int(rank) is None) or (not colon and "," in text):
            raise LaunchError(f"{flag} {text}: write 0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:THAT,...")
        found[int(rank) if colon else -1] = _STREAMS_BY_DIGIT[streams]
    return found
