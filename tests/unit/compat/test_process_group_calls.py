"""Tests of starting and querying the process group from a script, in one process."""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.compat import collectives as comm
from windlass.compat.collectives.monitored_barrier import find_missing
from windlass.compat.deepspeed_initialize import initialize

# Parameters of DeepSpeed 0.19's functions, in the same order.
SIGNATURES = {
    "init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method "
    "dist_init_required config rank world_size",
    "configure": "deepspeed_config enabled prof_all prof_ops verbose debug",
    "log_summary": "show_straggler return_dict",
    "broadcast": "tensor src group async_op prof log_name debug",
    "broadcast_object_list": "object_list src group device prof log_name debug",
    "all_gather": "tensor_list tensor group async_op prof log_name debug",
    "all_gather_object": "object_list obj group prof log_name debug",
    "all_gather_into_tensor": "output_tensor tensor group async_op prof log_name debug",
    "allgather_fn": "output_tensor input_tensor group async_op debug",
    "all_gather_coalesced": "output_tensors input_tensors group async_op",
    "reduce_scatter_fn": "output_tensor tensor op group async_op prof debug",
    "reduce_scatter_tensor": "output_tensor tensor op group async_op prof log_name debug",
    "reduce_scatter": "output input_list op group async_op prof log_name debug",
    "reduce": "tensor dst op group async_op prof log_name debug",
    "all_reduce": "tensor op group async_op prof log_name debug",
    "inference_all_reduce": "tensor op group async_op prof log_name debug",
    "all_reduce_coalesced": "tensors op group async_op prof log_name debug",
    "all_to_all_single": "output tensor output_split_sizes input_split_sizes group async_op prof log_name debug",
    "all_to_all": "output_tensor_list input_tensor_list group async_op prof log_name debug",
    "send": "tensor dst group tag prof log_name debug",
    "recv": "tensor src group tag prof log_name debug",
    "isend": "tensor dst group tag prof log_name debug",
    "irecv": "tensor src group tag prof log_name debug",
    "batch_isend_irecv": "p2p_op_list prof log_name debug",
    "gather": "tensor gather_list dst group async_op prof log_name debug",
    "scatter": "tensor scatter_list src group async_op prof log_name debug",
    "barrier": "group async_op device_ids prof log_name debug",
    "monitored_barrier": "group timeout wait_all_ranks prof log_name debug",
    "P2POp": "op tensor peer group tag",
    "TorchBackend": "backend timeout init_method rank world_size name",
    "initialize_mesh_device": "mesh_shape mesh_dim_names",
    "new_group": "ranks",
    "mpi_discovery": "distributed_port verbose",
}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL", "MASTER", "OMPI", "PMI", "SLURM", "MPI", "DEEPSPEED_TIMEOUT")


@pytest.fixture
def alone() -> Iterator[None]:
    """Ensure that there is no launcher and no process group, before and after the test."""
    if dist.is_initialized():
        pytest.skip("another test left its process group")
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_equal_deepspeed(name: str) -> None:
    expected = SIGNATURES[name].split()
    assert list(inspect.signature(getattr(comm, name)).parameters)[: len(expected)] == expected


@pytest.mark.usefixtures("alone")
def test_a_script_without_a_launcher_is_a_world_of_one() -> None:
    assert not comm.is_initialized() and comm.is_available() and comm.cdb is None
    with pytest.raises(CommunicationError, match="call init_distributed"):
        comm.all_reduce(torch.ones(1))
    with pytest.raises(CommunicationError, match="dist_init_required=False"):
        comm.init_distributed(dist_init_required=False)
    # Determined AI's tests match this text.
    with pytest.raises(AssertionError, match="^Distributed backend is not initialized"):
        initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": 1}, dist_init_required=False)
    comm.init_distributed(verbose=False)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "1", "0")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_global_rank()) == (0, 1, 0, 0)
    comm.init_distributed(verbose=False, dist_init_required=False)  # accepted, because the process group exists already
    assert comm.get_all_ranks_from_group() == [0] == comm.get_all_ranks_from_group(comm.new_group([0]))
    backend = comm.cdb
    assert backend.is_initialized() and backend.get_backend() == "gloo" and backend.world_size == 1
    local = torch.tensor([2.0, 0.0])
    backend.all_reduce(local, comm.ReduceOp.LAND)
    assert local.tolist() == [1.0, 0.0]
    full = torch.zeros(1, 2)
    assert comm.TorchBackend.get_all_gather_function()(full, local, group=None, async_op=True).wait()
    assert full.tolist() == [[1.0, 0.0]]
    assert comm.initialize_mesh_device((1,), ("data",)).mesh_dim_names == ("data",)
    comm.destroy_process_group()
    assert not comm.is_initialized()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        # The first `init_distributed` set WORLD_SIZE to 1, and a world of one rank does not use the busy port.
        comm.init_distributed(verbose=False)
    assert comm.get_world_size() == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is there")
def test_backend_without_cuda_is_gloo(tmp_path: Path) -> None:
    comm.init_distributed("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, verbose=False)
    assert dist.get_backend() == "gloo" and comm.get_rank() == 0


@pytest.mark.usefixtures("alone")
def test_failed_rendezvous_is_one_message() -> None:
    with pytest.raises(CommunicationError, match="could not connect at init_method = 'nowhere://'"):
        comm.init_distributed("gloo", init_method="nowhere://", rank=0, world_size=1)


@pytest.mark.usefixtures("alone")
def test_discovery_fills_the_environment() -> None:
    comm.mpi_discovery(1234, verbose=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["0", "1", "0", "127.0.0.1", "1234"]
    assert (comm.get_world_rank_from_launcher(), comm.get_world_size_from_launcher()) == (0, 1)


def test_switches_of_the_comms_logger_select_operations() -> None:
    log = comm.CommsLogger()
    log.enabled = True
    try:
        log.stop_profiling_comms()
        log.start_profiling_op(["send", "recv"])
        log.stop_profiling_op(["recv"])
        assert [log.should_record(name, False) for name in ("send", "recv")] == [True, False]
        log.start_profiling_comms()
        assert log.should_record("recv", False)
        log.append("send", "mine", latency=1.0, msg_size=8, ranks=2)
        assert log.get_raw_data() == log.comms_dict and log.get_raw_data()["mine"][8][0] == 1
        log.append("reduce_scatter_tensor", "parts", latency=8.0, msg_size=4_000_000, ranks=4)  # size of the input
        assert log.comms_dict["parts"][4_000_000] == [1, [8.0], [4.0], [3.0]]
    finally:
        log.enabled = False


@pytest.mark.parametrize("given", [{"comms_logger": {"enabled": True, "prof_ops": "broadcast"}}, "whole", "section"])
def test_comms_logger_accepts_every_configuration_form(given: object) -> None:
    from windlass.config import load_config

    config = {"train_batch_size": 1, "comms_logger": {"enabled": True, "prof_ops": ["broadcast"]}}
    source = {"whole": load_config(config), "section": load_config(config).comms_logger}.get(str(given), given)
    log = comm.CommsLogger()
    try:
        log.configure(source)
        assert log.enabled and log.prof_ops == ["broadcast"] and log.should_record("x", False)
    finally:
        log.enabled = False


class Arrivals:
    """Fake store in which each rank's key is set at a given time. Its waits advance a fake clock, `now`."""

    def __init__(self, times: dict[int, float]) -> None:
        self.times, self.now = times, 0.0

    def check(self, keys: list[str]) -> bool:
        return all(self.times[int(key)] <= self.now for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert timeout >= timedelta(milliseconds=1)  # torch truncates to milliseconds
        at, until = max(self.times[int(key)] for key in keys), self.now + timeout.total_seconds()
        self.now = max(self.now, min(at, until))
        if at > until:
            raise RuntimeError("timeout")


@pytest.mark.parametrize(
    ("times", "missing", "all_missing"),
    [
        ({1: 0.9, 2: 1.8, 3: 2.7}, [2], []),  # with `wait_all_ranks` ranks 2 and 3 still arrive
        ({1: 5.0, 2: 0.9, 3: 5.0}, [1], [1, 3]),
        ({1: 1.0, 2: 1.0, 3: 0.5}, [], []),
    ],
)
def test_the_first_rank_of_a_monitored_barrier_waits_for_one_timeout(
    times: dict[int, float], missing: list[int], all_missing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `wait_all_ranks` it waits up to one timeout for each of the 3 others; otherwise they share one timeout."""
    for wait_all_ranks, expected, limit in ((False, missing, 1.0), (True, all_missing, 3.0)):
        store = Arrivals(times)
        monkeypatch.setattr(time, "monotonic", lambda store=store: store.now)
        assert find_missing(store, [1, 2, 3], timedelta(seconds=1), wait_all_ranks=wait_all_ranks) == expected
        assert store.now <= limit
