"""Tests of the rank placement that each launcher's environment variables determine."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.base.errors import CommunicationError
from windlass.comm.rank_environment import local_rank_of, rank_environment

OMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ONE_HOST = {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}

# Environment -> source, rank, world, local rank, local world, master, port
PLACES: dict[str, tuple[dict[str, str], tuple[Any, ...]]] = {
    "torchrun": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
         "MASTER_PORT": "9"},
        ("the environment", 3, 4, 1, 2, "a", 9),
    ),
    "deepspeed": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
         "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
        ("the environment", 3, 4, 1, 2, "a", 29500),
    ),
    "torchrun in a Slurm step": (
        {**SLURM, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
        ("the environment", 0, 2, 0, None, "a", 9),
    ),
    "pods, which have no local rank": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
        ("the environment", 1, 2, None, None, "a", 9),
    ),
    "mpirun on two hosts": (OMPI, ("Open MPI", 5, 8, 1, 4, None, None)),
    "mpirun on one": (ONE_HOST, ("Open MPI", 5, 8, 1, 8, "127.0.0.1", None)),
    "mpirun -x MASTER_ADDR": ({**OMPI, "MASTER_ADDR": "b"}, ("Open MPI", 5, 8, 1, 4, "b", None)),
    "mpirun in a Slurm allocation": ({**SLURM, **ONE_HOST}, ("Open MPI", 5, 8, 1, 8, "127.0.0.1", None)),
    "MVAPICH": (
        {name.replace("OMPI", "MV2"): value for name, value in ONE_HOST.items()},
        ("MVAPICH", 5, 8, 1, 8, "127.0.0.1", None),
    ),
    "MPICH, Intel MPI": (HYDRA, ("MPI (PMI)", 1, 2, 1, 2, "127.0.0.1", None)),
    "their proxies in a Slurm step": ({**SLURM, **HYDRA}, ("MPI (PMI)", 1, 2, 1, 2, "127.0.0.1", None)),
    "mpirun on two hosts of a Slurm allocation": (
        {**OMPI, "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_STEP_NODELIST": "gpu08", "SLURM_JOB_ID": "5"},
        ("Open MPI", 5, 8, 1, 4, "gpu07", None),
    ),
    "PMIx without PMI": (
        {"PMIX_RANK": "1", "PALS_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
        ("MPI (PMI)", 1, 2, 1, 2, "127.0.0.1", None),
    ),
    "srun --mpi=pmix": ({**SLURM, "PMIX_RANK": "3"}, ("Slurm", 3, 4, 1, None, "gpu07", 19711)),
    "Cray": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"},
        ("MPI (PMI)", 1, 2, 0, 1, None, None),
    ),
    "srun --mpi=pmi2": ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("Slurm", 3, 4, 1, None, "gpu07", 19711)),
    "srun": (SLURM, ("Slurm", 3, 4, 1, None, "gpu07", 19711)),
    "srun on one host": (
        {**SLURM, "SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_NUM_NODES": "1"},
        ("Slurm", 3, 4, 1, 4, "127.0.0.1", 19711),
    ),
    "srun, a part of the job's tasks": (
        {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4"}, ("Slurm", 3, 4, 1, None, "gpu07", 19711),
    ),
    "srun, unequal hosts": (
        {**SLURM, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,1"}, ("Slurm", 3, 4, 1, 1, "gpu07", 19711),
    ),
    "RANK that is empty": ({**SLURM, "RANK": "", "WORLD_SIZE": ""}, ("Slurm", 3, 4, 1, None, "gpu07", 19711)),
    "srun with a master": (
        {**SLURM, "MASTER_ADDR": "c", "MASTER_PORT": "77"}, ("Slurm", 3, 4, 1, None, "c", 77),
    ),
    "Azure ML": (
        {**OMPI, "AZUREML_EXPERIMENT_ID": "x", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        ("Azure ML", 5, 8, 1, 4, "10.0.0.4", 6105),
    ),
    "Azure ML on one host": (
        {**ONE_HOST, "AZUREML_EXPERIMENT_ID": "x", "AZ_BATCHAI_MPI_MASTER_NODE": "n"},
        ("Azure ML", 5, 8, 1, 8, "127.0.0.1", 54965),
    ),
    "SageMaker": (
        {**OMPI, "SM_TRAINING_ENV": "{}", "SM_HOSTS": '["algo-1","algo-2"]'},
        ("SageMaker", 5, 8, 1, 4, "algo-1", None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_rank_environment_is_read(name: str) -> None:
    environ, expected = PLACES[name]
    place = rank_environment(environ)
    assert place is not None
    actual = (place.source, place.rank, place.world, place.local_rank, place.local_world, place.master, place.port)
    assert actual == expected and place.warning == ""


@pytest.mark.parametrize("environ", [{}, {"SLURM_NTASKS": "4"}, {"PMI_RANK": "0"}, {"MASTER_ADDR": "a"}])
def test_rank_environment_is_none_without_a_launcher(environ: dict[str, str]) -> None:
    assert rank_environment(environ) is None


def test_other_launchers_are_detected_only_on_request() -> None:
    assert rank_environment(OMPI, others=False) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "sets rank 2 of 2 ranks; correct the rank"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is missing"),
    ],
)
def test_invalid_environment_is_refused_by_variable(environ: dict[str, str], words: str) -> None:
    with pytest.raises(CommunicationError, match=words):
        rank_environment(environ)


def test_suspicious_environment_is_warned_about() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}
    alone = {**OMPI, "RANK": "0", "WORLD_SIZE": "1"}
    for environ, words in (
        (batch, "was not started by srun"),
        (alone, "Open MPI started 8 processes: each trains alone"),
    ):
        place = rank_environment(environ)
        assert place is not None and words in place.warning


def test_local_rank_is_the_first_variable_set() -> None:
    assert local_rank_of({"LOCAL_RANK": "2", "SLURM_LOCALID": "1"}) == 2
    assert local_rank_of({"SLURM_LOCALID": "1"}) == 1
    assert local_rank_of({}) is None
