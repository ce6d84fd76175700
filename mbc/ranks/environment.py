"""The rank of this process, from the variables of its launcher: mpirun, mpiexec, srun, torchrun, or mbc itself."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbc.errors import MbcError

Address = tuple[str, int]

# Derived ports are above the ports of services, and below those that Linux gives to clients.
_FIRST_PORT = 20_000
_PORTS = 12_000

# Variables of the rank, the number of ranks, and both on one machine; the innermost launcher comes first.
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
    """One process of several.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        local_rank: Number of this process on its machine, from 0.
        local_size: Number of processes on its machine; 0 while it is unknown.
        launcher: Program that started the processes.
        job: Text that is equal on all ranks and different for other trainings; empty if the launcher has none.
        master: Address at which rank 0 listens; None if all ranks are on this machine, or if the launcher does not say.
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
        """True if all ranks are on this machine."""
        return self.local_size == self.size


def read_environment(variables: Mapping[str, str]) -> RankEnvironment | None:
    """Return the rank of this process; None if it is the only process.

    `MBC_JOB`, `MBC_MASTER` (host:port), `MBC_LOCAL_RANK` and `MBC_LOCAL_RANKS` give facts that a launcher does not
    give, and override those that it gives.

    Raises:
        MbcError: MBC260 if variables contradict each other, or if one is missing.
    """
    ranks = [one for name in _VARIABLES if (one := _of_launcher(name, variables)) is not None]
    step = _of_srun(variables)
    # srun may start mpirun and torchrun on other machines; their processes inherit srun's variables. If srun starts the
    # ranks themselves, it may also set the variables of mpiexec (`--mpi=pmi2`).
    same = step is not None and [(one.launcher, one.rank, one.size) for one in ranks] == [
        ("mpiexec", step.rank, step.size)
    ]
    if same or not ranks:
        ranks = [] if step is None else [step]
    if not ranks:
        return None
    chosen = ranks[0]
    for other in ranks[1:]:
        if (other.rank, other.size) != (chosen.rank, chosen.size):
            raise _contradiction(
                f"{chosen.launcher} says rank {chosen.rank} of {chosen.size}, {other.launcher} says rank {other.rank}"
                f" of {other.size}"
            )
    local = [one for one in ranks if one.local_size]
    if not local:
        raise _no_local_rank(chosen, variables)
    chosen = replace(chosen, local_rank=local[0].local_rank, local_size=local[0].local_size)
    job = variables.get("MBC_JOB") or next((one.job for one in local if one.job), chosen.job)
    return replace(chosen, job=job, master=_master(chosen, job, variables))


def device_of(environment: RankEnvironment, visible: int) -> int:
    """Return the number of this rank's CUDA device among `visible` devices.

    A launcher may show each rank a GPU of its own (`srun --gpus-per-task=1`), which then is device 0.

    Raises:
        MbcError: MBC266 if there are fewer devices than ranks on this machine.
    """
    if environment.local_rank < visible:
        return environment.local_rank
    if visible == 1:
        return 0
    raise MbcError(
        "MBC266",
        f"rank {environment.rank} is number {environment.local_rank} of {environment.local_size} on its machine, but"
        f" sees only {visible} GPUs",
        "start as many ranks as there are GPUs, and check CUDA_VISIBLE_DEVICES",
    )


def derived_port(text: str, taken: int = 0) -> int:
    """Return a port from 20000 to 31999 by the CRC-32 of a job's name: equal on all ranks, and not `taken`."""
    port = _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS
    return port + 1 if port == taken else port


def parse_address(text: str, name: str) -> Address:
    """Return host and port of a text `host:port`; an IPv6 address is in brackets [].

    Args:
        text: The address.
        name: Name of the variable that holds the text, for the error's message.

    Raises:
        MbcError: MBC260 if the text is no address.
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[3]) < 65536:
        raise MbcError(
            "MBC260", f"{name} is '{text}', which is not host:port", f"set {name} to something like node01:29600"
        )
    return match[1] or match[2], int(match[3])


def first_host(nodes: str) -> str:
    """Return the first host of a node list of Slurm: `node01` for `node[01-04,07],gpu3`."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def tasks_on_node(text: str, node: int) -> int:
    """Return the number of a Slurm step's tasks on a node, from a text such as `2(x3),1`; 0 if it is unknown."""
    counts: list[int] = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeated or 1)
    return counts[node] if node < len(counts) else 0


def _of_launcher(name: str, variables: Mapping[str, str]) -> RankEnvironment | None:
    """Return the rank by one launcher's variables; None if it did not start this process, or started only this one.

    `local_size` is 0 if the launcher does not give it.
    """
    rank_name, size_name, *local_names = _VARIABLES[name]
    there = [key for key in (rank_name, size_name) if variables.get(key, "") != ""]
    if len(there) < 2:
        if there and name != "torchrun":  # other programs use single names of torchrun, too
            missing = size_name if there == [rank_name] else rank_name
            raise MbcError("MBC260", f"{there[0]} is set, but {missing} is not", f"set {missing}, or unset {there[0]}")
        return None
    names = [
        given if variables.get(given, "") != "" else own for given, own in zip(_GIVEN_LOCAL, local_names, strict=True)
    ]
    local_rank, local_size = (
        tuple(_number(variables, one) for one in names)
        if all(variables.get(one, "") != "" for one in names)
        else (0, 0)
    )
    rank = RankEnvironment(
        rank=_number(variables, rank_name),
        size=_number(variables, size_name),
        local_rank=local_rank,
        local_size=local_size,
        launcher=name,
        job=_job(name, variables),
    )
    return _checked(rank, rank_name, size_name)


def _of_srun(variables: Mapping[str, str]) -> RankEnvironment | None:
    """Return the rank of a task of a Slurm step; None outside a step, as in the shell of sbatch and salloc."""
    if not all(variables.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if variables.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size, node = _number(variables, size_name, 1), _number(variables, "SLURM_NODEID", 0)
    on_node = tasks_on_node(
        variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", ""), node
    )
    if not on_node and "," not in variables["SLURM_STEP_NODELIST"] and "[" not in variables["SLURM_STEP_NODELIST"]:
        on_node = size
    rank = RankEnvironment(
        rank=_number(variables, "SLURM_PROCID"),
        size=size,
        local_rank=_number(variables, "SLURM_LOCALID", 0),
        local_size=on_node,
        launcher="srun",
        job=_job("srun", variables),
    )
    return _checked(rank, "SLURM_PROCID", size_name)


def _checked(process: RankEnvironment, rank_name: str, size_name: str) -> RankEnvironment | None:
    if process.size < 1 or process.rank >= process.size:
        raise _contradiction(f"{rank_name} is {process.rank}, but {size_name} is {process.size}")
    if process.size == 1:
        return None
    if process.local_size and not process.local_rank < process.local_size <= process.size:
        raise _contradiction(
            f"{process.launcher} says number {process.local_rank} of {process.local_size} on this machine, of"
            f" {process.size} ranks"
        )
    return process


def _job(launcher: str, variables: Mapping[str, str]) -> str:
    """Return the launcher's name of the training; after a failure, torchrun restarts with a higher RESTART_COUNT."""
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
        store = _number(variables, "MASTER_PORT", 0)  # torchrun's own port
        return variables["MASTER_ADDR"], derived_port(job, taken=store)
    if chosen.launcher == "srun":
        return first_host(variables["SLURM_STEP_NODELIST"]), derived_port(job)
    return None


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "") or ("" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise MbcError("MBC260", f"{name} is '{text}', which is not a whole number", f"set {name} to a whole number")
    return int(text)


def _no_local_rank(chosen: RankEnvironment, variables: Mapping[str, str]) -> MbcError:
    """Return the error for a launcher that does not give this machine's ranks, or this process's number among them."""
    names = zip(_VARIABLES.get(chosen.launcher, _VARIABLES["mbc"])[2:], _GIVEN_LOCAL, strict=True)
    missing = [pair for pair in names if not any(variables.get(name) for name in pair)]
    if len(missing) == 1:
        own, given = missing[0]
        remedy = f"set {given}" if own == given else f"set it or {given}"
        return MbcError("MBC260", f"{own} is not set", remedy)
    return MbcError(
        "MBC260",
        f"{chosen.launcher} says rank {chosen.rank} of {chosen.size}, but not its number among this machine's ranks",
        f"set {_GIVEN_LOCAL[0]} (counted from 0) and {_GIVEN_LOCAL[1]} (the number of ranks on the machine)",
    )


def _contradiction(what: str) -> MbcError:
    return MbcError(
        "MBC260", f"the variables that say which rank this process is contradict each other: {what}",
        "start all ranks with one launcher, and unset the variables of others",
    )  # fmt: skip
