"""Which rank this process is, as the variables of its launcher say: mpirun, mpiexec, srun, torchrun, or mbc itself."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbc.errors import MbcError

Address = tuple[str, int]

# Derived ports: above those of services, below those that Linux gives to clients.
_FIRST_PORT = 20_000
_PORTS = 12_000

# Rank, number of ranks, and both counted on one machine; the innermost launcher first.
_VARIABLES: Mapping[str, tuple[str, str, str, str]] = {
    "mbc": ("MBC_RANK", "MBC_RANKS", "MBC_LOCAL_RANK", "MBC_LOCAL_RANKS"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
_GIVEN_LOCAL = _VARIABLES["mbc"][2:]


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """One process of several. `local_rank` of `local_size` are on this machine.

    `job` is the same text on all ranks, and another one for other trainings; empty where the launcher has none.
    `master` is the address where rank 0 listens: None where all ranks are on this machine, or where the launcher does
    not tell.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    job: str = ""
    master: Address | None = None

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def read_environment(variables: Mapping[str, str]) -> RankEnvironment | None:
    """The rank of this process; None where it is the only one.

    `MBC_JOB`, `MBC_MASTER` (host:port), `MBC_LOCAL_RANK` and `MBC_LOCAL_RANKS` say what a launcher leaves open, and
    count more than what it says of them. Raises MBC260 where variables contradict each other, or lack something.
    """
    found = [one for name in _VARIABLES if (one := _of_launcher(name, variables)) is not None]
    step = _of_srun(variables)
    # mpirun and torchrun are themselves started on other machines by srun, whose variables their processes inherit.
    # Where srun starts the ranks, it may say so in the variables of mpiexec (`--mpi=pmi2`), too.
    same = step is not None and [(one.launcher, one.rank, one.size) for one in found] == [
        ("mpiexec", step.rank, step.size)
    ]
    known = found if found and not same else ([] if step is None else [step])
    if not known:
        return None
    chosen = known[0]
    for other in known[1:]:
        if (other.rank, other.size) != (chosen.rank, chosen.size):
            raise _contradiction(
                f"{chosen.launcher} says rank {chosen.rank} of {chosen.size}, {other.launcher} says rank {other.rank}"
                f" of {other.size}"
            )
    told = [one for one in known if one.local_size]
    if not told:
        raise _not_told(chosen, variables)
    chosen = replace(chosen, local_rank=told[0].local_rank, local_size=told[0].local_size)
    job = variables.get("MBC_JOB") or next((one.job for one in told if one.job), chosen.job)
    return replace(chosen, job=job, master=_master(chosen, job, variables))


def device_of(environment: RankEnvironment, visible: int) -> int:
    """The CUDA device of this rank, of the `visible` ones; MBC266 where there are fewer than ranks.

    A launcher may show each rank a GPU of its own (`srun --gpus-per-task=1`), which then is device 0.
    """
    if environment.local_rank < visible:
        return environment.local_rank
    if visible == 1:
        return 0
    raise MbcError(
        "MBC266",
        f"rank {environment.rank} is number {environment.local_rank} of {environment.local_size} on its machine, which"
        f" shows it {visible} GPUs",
        "start as many ranks as there are GPUs, and look at CUDA_VISIBLE_DEVICES",
    )


def derived_port(text: str, taken: int = 0) -> int:
    """A port from 20000 to 31999 by the CRC-32 of a job's name: the same on all ranks, and not `taken`."""
    port = _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS
    return port + 1 if port == taken else port


def parse_address(text: str, name: str) -> Address:
    """`host:port`, with [] around an address of IPv6; `name` is the variable that MBC260 tells of."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[3]) < 65536:
        raise MbcError(
            "MBC260", f"{name} is '{text}', which is not host:port", f"set {name} to something like node01:29600"
        )
    return match[1] or match[2], int(match[3])


def first_host(nodes: str) -> str:
    """The first of a list of Slurm's: `node01` of `node[01-04,07],gpu3`."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def tasks_on_node(text: str, node: int) -> int:
    """How many tasks of a step run on a node, of `2(x3),1`; 0 where that is not told."""
    counts: list[int] = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeated or 1)
    return counts[node] if node < len(counts) else 0


def _of_launcher(name: str, variables: Mapping[str, str]) -> RankEnvironment | None:
    """What one launcher says; None where it did not start this process, or as the only one. `local_size` is 0 where it
    does not tell."""
    rank_name, size_name, *local_names = _VARIABLES[name]
    there = [key for key in (rank_name, size_name) if variables.get(key, "") != ""]
    if len(there) < 2:
        if there and name != "torchrun":  # whose names are used by others, too, one by one
            missing = size_name if there == [rank_name] else rank_name
            raise MbcError("MBC260", f"{there[0]} is set, but {missing} is not", f"set {missing}, or unset {there[0]}")
        return None
    told = [
        given if variables.get(given, "") != "" else own for given, own in zip(_GIVEN_LOCAL, local_names, strict=True)
    ]
    local_rank, local_size = (
        tuple(_number(variables, one) for one in told) if all(variables.get(one, "") != "" for one in told) else (0, 0)
    )
    made = RankEnvironment(
        rank=_number(variables, rank_name),
        size=_number(variables, size_name),
        local_rank=local_rank,
        local_size=local_size,
        launcher=name,
        job=_job(name, variables),
    )
    return _checked(made, rank_name, size_name)


def _of_srun(variables: Mapping[str, str]) -> RankEnvironment | None:
    """A task of a step of Slurm. The shell of sbatch and salloc is no step, or one of a single task."""
    if not all(variables.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if variables.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size, node = _number(variables, size_name, 1), _number(variables, "SLURM_NODEID", 0)
    on_node = tasks_on_node(
        variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", ""), node
    )
    if not on_node and "," not in variables["SLURM_STEP_NODELIST"] and "[" not in variables["SLURM_STEP_NODELIST"]:
        on_node = size
    made = RankEnvironment(
        rank=_number(variables, "SLURM_PROCID"),
        size=size,
        local_rank=_number(variables, "SLURM_LOCALID", 0),
        local_size=on_node,
        launcher="srun",
        job=_job("srun", variables),
    )
    return _checked(made, "SLURM_PROCID", size_name)


def _checked(made: RankEnvironment, rank_name: str, size_name: str) -> RankEnvironment | None:
    if made.size < 1 or made.rank >= made.size:
        raise _contradiction(f"{rank_name} is {made.rank} where {size_name} is {made.size}")
    if made.size == 1:
        return None
    if made.local_size and not made.local_rank < made.local_size <= made.size:
        raise _contradiction(
            f"{made.launcher} says number {made.local_rank} of {made.local_size} on this machine, of {made.size} ranks"
        )
    return made


def _job(launcher: str, variables: Mapping[str, str]) -> str:
    """What the launcher calls the training. torchrun starts anew after a failure, by a higher RESTART_COUNT."""
    names = {
        "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        "mpirun": ("PMIX_NAMESPACE",) if variables.get("PMIX_NAMESPACE") else ("OMPI_MCA_ess_base_jobid",),
        "srun": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    }.get(launcher, ())
    parts = [variables[name] for name in names if variables.get(name)]
    return f"{launcher}-{'-'.join(parts)}" if parts else ""


def _master(chosen: RankEnvironment, job: str, variables: Mapping[str, str]) -> Address | None:
    if given := variables.get("MBC_MASTER"):
        return parse_address(given, "MBC_MASTER")
    if chosen.one_machine:
        return None
    if chosen.launcher == "torchrun" and variables.get("MASTER_ADDR"):
        store = _number(variables, "MASTER_PORT", 0)  # is torchrun's own
        return variables["MASTER_ADDR"], derived_port(job, taken=store)
    if chosen.launcher == "srun":
        return first_host(variables["SLURM_STEP_NODELIST"]), derived_port(job)
    return None


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "") or ("" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise MbcError("MBC260", f"{name} is '{text}', which is not a whole number", f"set {name} as launchers do")
    return int(text)


def _not_told(chosen: RankEnvironment, variables: Mapping[str, str]) -> MbcError:
    """Where nothing says which of this machine's ranks this process is, or of how many."""
    names = zip(_VARIABLES.get(chosen.launcher, _VARIABLES["mbc"])[2:], _GIVEN_LOCAL, strict=True)
    missing = [pair for pair in names if not any(variables.get(name) for name in pair)]
    if len(missing) == 1:
        own, given = missing[0]
        remedy = f"set {given}" if own == given else f"set it or {given}"
        return MbcError("MBC260", f"{own} is not set", remedy)
    return MbcError(
        "MBC260",
        f"{chosen.launcher} says rank {chosen.rank} of {chosen.size}, but not which of this machine's it is",
        f"set {_GIVEN_LOCAL[0]} (counted from 0) and {_GIVEN_LOCAL[1]} (how many are on the machine)",
    )


def _contradiction(what: str) -> MbcError:
    return MbcError(
        "MBC260", f"the variables that say which rank this process is contradict each other: {what}",
        "start all ranks with one launcher, and unset the variables of others",
    )  # fmt: skip
