"""Command `ds_bench`: latency and bandwidth of collectives, on a launcher's ranks or on new ones of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.compute_device import local_device
from windlass.base.dtypes import parse_dtype
from windlass.base.errors import CommunicationError, WindlassError
from windlass.base.text import print_escaped
from windlass.comm.rank_environment import rank_environment
from windlass.compat import collectives
from windlass.compat.collective_benchmark import OPERATIONS, CollectiveRow, CollectiveSettings, measure_collectives
from windlass.launch.launch_flags import int_between

_DEFAULT_RANKS = 2
_MOST_CALLS = 1_000_000
_COPIES = 4  # assumed number of copies of a message in an operation's buffers, per rank of the group


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `ds_bench`."""
    parser = argparse.ArgumentParser("ds_bench", description="Measure collectives between ranks.")
    parser.add_argument("--local_rank", type=int, help="accepted and ignored; ranks read LOCAL_RANK")
    parser.add_argument("--trials", type=int_between(1, _MOST_CALLS), default=50, help="timed calls of each size [50]")
    parser.add_argument("--warmups", type=int_between(0, _MOST_CALLS), default=5, help="untimed calls before [5]")
    parser.add_argument(
        "--maxsize", type=int_between(1, 40), default=24, help="log2 of the elements of the largest message [24]"
    )
    parser.add_argument("--async-op", action="store_true", help="start the operation, then wait for it")
    parser.add_argument("--bw-unit", choices=("Gbps", "GBps"), default="Gbps", help="unit of bandwidths [Gbps]")
    parser.add_argument("--backend", choices=("nccl", "ccl", "mpi", "gloo"), help="back end [nccl on GPUs, else gloo]")
    parser.add_argument(
        "--dist", choices=("deepspeed", "torch"), default="deepspeed", help="accepted and ignored; both use torch"
    )
    parser.add_argument(
        "--scan", action="store_true", help="measure all powers of 2 up to --maxsize, not only the largest"
    )
    parser.add_argument("--raw", action="store_true", help="print sizes in bytes and times in us, without units")
    parser.add_argument("--dtype", default="float", help="dtype of the elements [float]")
    parser.add_argument("--mem-factor", type=float, default=0.3, help="share of the free memory for buffers [0.3]")
    parser.add_argument("--device", default="cuda", help="accepted and ignored; ranks use GPUs if there are any")
    parser.add_argument("--debug", action="store_true", help="print the settings")
    for operation in OPERATIONS:
        parser.add_argument(f"--{operation.replace('_', '-')}", action="store_true", help=f"measure {operation}")
    return parser


@exit_quietly_on_broken_pipe()
def ds_bench(argv: Sequence[str] | None = None) -> int:
    """Run `ds_bench`. Return the exit code.

    Without a launcher's variables in the environment, the command starts a rank for each GPU, or two ranks on the CPU.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    asked = build_parser().parse_args(words)
    try:
        dtype = parse_dtype(asked.dtype)
        if not 0 < asked.mem_factor <= 1:
            raise CommunicationError(
                f"--mem-factor {asked.mem_factor} is not a share of the free memory; write a number in (0, 1]"
            )
        if rank_environment(os.environ) is None:
            return _start_ranks(words)
        collectives.init_distributed(None if asked.backend == "ccl" else asked.backend, verbose=False)
        settings = _settings_from_args(asked, dtype)
        if asked.debug and collectives.get_rank() == 0:
            print_escaped(str(settings))
        _print_rows(settings, asked.bw_unit, raw=asked.raw)
    except WindlassError as error:
        print_escaped(f"ds_bench: {error}", to_stderr=True)
        return 1
    collectives.barrier()
    collectives.destroy_process_group()
    return 0


def _start_ranks(words: list[str]) -> int:
    from windlass.compat.deepspeed_command import main

    ranks = torch.cuda.device_count() or _DEFAULT_RANKS
    main(["--num_gpus", str(ranks), "--no_local_rank", "--module", "windlass.compat.ds_bench", *words])
    return 0


def _settings_from_args(asked: argparse.Namespace, dtype: torch.dtype) -> CollectiveSettings:
    chosen = [operation for operation in OPERATIONS if getattr(asked, operation)]
    if not chosen:
        chosen = [operation for operation in OPERATIONS if operation != "pt2pt" or collectives.get_world_size() > 1]
    limit = asked.mem_factor * _free_bytes() / (_COPIES * collectives.get_world_size())
    largest = max(1, asked.maxsize)
    while largest > 1 and dtype.itemsize << largest > limit:
        largest -= 1
    powers = range(1, largest + 1) if asked.scan else (largest,)
    sizes = [dtype.itemsize << power for power in powers]
    return CollectiveSettings(chosen, sizes, (dtype,), asked.warmups, asked.trials, asked.async_op)


def _free_bytes() -> int:
    """Return the smallest free memory of any rank, in bytes. Collective."""
    device = local_device()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    smallest = torch.tensor(free, dtype=torch.int64, device=device)
    collectives.all_reduce(smallest, op=collectives.ReduceOp.MIN)
    return int(smallest)


def _print_rows(settings: CollectiveSettings, unit: str, *, raw: bool) -> None:
    """Measure each operation, and print a table for it on rank 0."""
    shown = ""
    for row in measure_collectives(settings):
        if collectives.get_rank() != 0:
            continue
        if row.operation != shown:
            shown = row.operation
            print_escaped(f"---- {shown} ({row.dtype}), {collectives.get_world_size()} ranks ".ljust(90, "-"))
            print_escaped(f"{'Size (Bytes)':<20}{'Duration':<20}{f'Throughput ({unit})':<25}{f'BusBW ({unit})':<25}")
        print_escaped(format_row(row, unit, raw=raw))


def format_row(row: CollectiveRow, unit: str, *, raw: bool) -> str:
    """Return one line of the table."""
    scale = 1.0 if unit == "Gbps" else 8.0
    size, took = (str(row.nbytes), f"{row.seconds * 1e6:.3f}") if raw else (_short(row.nbytes), _duration(row.seconds))
    return f"{size:<20}{took:<20}{row.algorithm_gbps / scale:<25.3f}{row.bus_gbps / scale:<25.3f}".rstrip()


def _short(nbytes: int) -> str:
    return collectives.convert_size(nbytes)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def main() -> None:
    """Run `ds_bench` and exit with its code."""
    sys.exit(ds_bench())


if __name__ == "__main__":
    main()
