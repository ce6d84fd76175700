"""The rank that the variables of launchers give."""

from __future__ import annotations

import pytest

from mbc.errors import MbcError
from mbc.ranks.environment import (
    RankEnvironment,
    derived_port,
    device_of,
    first_host,
    parse_address,
    read_environment,
    tasks_on_node,
)

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-77@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
STEP = {
    "SLURM_JOB_ID": "815", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
TORCHRUN = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
OWN = {"MBC_RANK": "0", "MBC_RANKS": "2", "MBC_LOCAL_RANK": "0", "MBC_LOCAL_RANKS": "2", "MBC_JOB": "abc"}
SHELL = {"SLURM_JOB_ID": "815", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN_JOB = "srun-815-2"
TORCH_JOB = "torchrun-run-gpu07-29500-0"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "WORLD_SIZE": "8"}, None),  # as batch scripts export it for others
        (OPEN_MPI, RankEnvironment(3, 4, 1, 2, "mpirun", "mpirun-prterun-a-77@1")),
        (OPEN_MPI | {"MBC_MASTER": "gpu07:29600"},
         RankEnvironment(3, 4, 1, 2, "mpirun", "mpirun-prterun-a-77@1", ("gpu07", 29600))),
        (HYDRA, RankEnvironment(1, 2, 1, 2, "mpiexec")),
        (HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        (STEP, RankEnvironment(3, 4, 1, 2, "srun", SRUN_JOB, ("gpu07", derived_port(SRUN_JOB)))),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"},  # srun --mpi=pmi2
         RankEnvironment(3, 4, 1, 2, "srun", SRUN_JOB, ("gpu07", derived_port(SRUN_JOB)))),
        (STEP | {"SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3",
                 "SLURM_NODEID": "0"},
         RankEnvironment(3, 4, 3, 4, "srun", SRUN_JOB)),
        (SHELL, None),  # of sbatch
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, None),  # salloc
        (STEP | OPEN_MPI, RankEnvironment(3, 4, 1, 2, "mpirun", "mpirun-prterun-a-77@1")),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | TORCHRUN,  # one torchrun a node
         RankEnvironment(2, 4, 0, 2, "torchrun", TORCH_JOB, ("gpu07", derived_port(TORCH_JOB)))),
        (SHELL | HYDRA, RankEnvironment(1, 2, 1, 2, "mpiexec")),
        (TORCHRUN, RankEnvironment(2, 4, 0, 2, "torchrun", TORCH_JOB, ("gpu07", derived_port(TORCH_JOB)))),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, RankEnvironment(2, 4, 0, 4, "torchrun", TORCH_JOB)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        (OWN, RankEnvironment(0, 2, 0, 2, "mbc", "abc")),
        (OWN | HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, RankEnvironment(0, 2, 0, 2, "mbc", "abc")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MBC_LOCAL_RANKS": "2"},
         RankEnvironment(1, 2, 1, 2, "torchrun")),
        (HYDRA | {"MBC_LOCAL_RANK": "0", "MBC_LOCAL_RANKS": "1"}, RankEnvironment(1, 2, 0, 1, "mpiexec")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MBC_LOCAL_RANK": "0", "MBC_LOCAL_RANKS": "1"},
         RankEnvironment(1, 2, 0, 1, "mpiexec")),
    ],
)  # fmt: skip
def test_a_rank_has_its_launchers_number(variables, expected):
    assert read_environment(variables) == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"),
        (HYDRA | {"MPI_LOCALRANKID": "2"}, "mpiexec says number 2 of 2 on this machine, of 2 ranks"),
        (HYDRA | {"MPI_LOCALNRANKS": "3"}, "number 1 of 3 on this machine, of 2 ranks"),
        (OPEN_MPI | HYDRA, "mpirun says rank 3 of 4, mpiexec says rank 1 of 2"),
        (TORCHRUN | OPEN_MPI, "torchrun says rank 2 of 4, mpirun says rank 3 of 4"),
        (OWN | HYDRA, "mbc says rank 0 of 2, mpiexec says rank 1 of 2"),
        (STEP | {"SLURM_PROCID": "7"}, "SLURM_PROCID is 7, but SLURM_STEP_NUM_TASKS is 4"),
    ],
)
def test_contradictions_are_refused(variables, words):
    with pytest.raises(MbcError) as caught:
        read_environment(variables)
    assert caught.value.code == "MBC260"
    assert "which rank this process is contradict each other: " in caught.value.message
    assert words in caught.value.message and caught.value.remedy


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (HYDRA | {"PMI_SIZE": ""}, "PMI_RANK is set, but PMI_SIZE is not"),
        (HYDRA | {"PMI_RANK": "-1"}, "PMI_RANK is '-1', which is not a whole number"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x', which is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun says rank 0 of 2, but not its number among this machine's ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MBC_LOCAL_RANKS": "2"}, "LOCAL_RANK is not set"),
        (OPEN_MPI | {"MBC_MASTER": "gpu07"}, "MBC_MASTER is 'gpu07', which is not host:port"),
        (OPEN_MPI | {"MBC_MASTER": "gpu07:70000"}, "MBC_MASTER is 'gpu07:70000', which is not host:port"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT is 'x', which is not a whole number"),
    ],
)
def test_missing_or_unreadable_parts_are_named(variables, words):
    with pytest.raises(MbcError) as caught:
        read_environment(variables)
    assert (caught.value.code, caught.value.message) == ("MBC260", words)


def test_a_number_that_is_missing_may_be_given():
    with pytest.raises(MbcError) as caught:
        read_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert caught.value.remedy == "set it or MBC_LOCAL_RANKS"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu07", "gpu07"), ("gpu[07-08]", "gpu07"), ("gpu[3,5-9]-ib,cpu1", "gpu3-ib"), ("a1,b[2-3]", "a1"),
     ("r[1-2]n[05-06]", "r1n05")],
)  # fmt: skip
def test_the_first_host_of_a_list_of_nodes(nodes, host):
    assert first_host(nodes) == host


def test_tasks_on_a_node():
    assert [tasks_on_node("2(x3),1", node) for node in range(5)] == [2, 2, 2, 1, 0]


def test_addresses():
    assert parse_address("[fe80::1]:29600", "MBC_MASTER") == ("fe80::1", 29600)
    assert parse_address("node:1", "MBC_MASTER") == ("node", 1)


def test_a_derived_port_is_no_other_ones():
    port = derived_port("job")
    assert 20_000 <= port < 32_000 and derived_port("job", taken=port) != port
    assert len({derived_port(f"srun-{job}-0") for job in range(1000)}) > 900  # neighbours do not share one


def test_the_device_of_a_rank():
    second = RankEnvironment(1, 2, 1, 2, "srun")
    assert (device_of(second, 8), device_of(second, 1)) == (1, 0)
    with pytest.raises(MbcError, match=r"MBC266: rank 3 is number 3 of 4 on its machine, but sees only 2 GPUs"):
        device_of(RankEnvironment(3, 4, 3, 4, "mpirun"), 2)
