"""Where this process stands in a job of several: its rank, of how many, and where rank 0 listens.

Told by (i) `jaxdp.launch` or a user's own script, in JAX's plain variables; (ii) Slurm, for the
tasks of one `srun`; (iii) Open MPI's mpirun; (iv) an indexed Job of Kubernetes, which numbers its
pods.  Nothing else makes a process part of a job: neither a shell that salloc or sbatch opened, nor
variables that another program left behind.

JAX detects (ii) to (iv) as well.  It is told our result instead: it takes a shell in an allocation
of Slurm for task 0 of as many as were allocated, and waits for the others.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import environ as _environ
from pathlib import Path

from jaxdp.errors import UserError
from jaxdp.runtime.control import CONTROL

ADDRESS, COUNT, ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
PORT = "JAX_COORDINATOR_PORT"  # for schedulers that name the host
LOCAL_RANK = "JAXDP_LOCAL_RANK"
BIND = "JAXDP_COORDINATOR_BIND"
ATTEMPT = "JAXDP_ATTEMPT"
CORES = "JAXDP_CORES"
TIMEOUT = "JAXDP_JOIN_TIMEOUT"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_CHOICES = (LOCAL_DEVICES, "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES")

_PLAIN = (ADDRESS, COUNT, ID)
_TIMEOUT_S = 300
_POD = "JOB_COMPLETION_INDEX"
_FIRST_PORT, _PORTS = 61440, 4096  # as JAX chooses one for a job
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers batch scripts and interactive shells from here on


@dataclass(frozen=True)
class Place:
    """A process's place in its job.

    Attributes:
      rank, size: of all processes, counted from 0.
      address: `host:port` of rank 0, as it was given.
      found_by: who said so, for messages.
      local_rank: among the processes of this host; None if nobody said.
      bind: the address that rank 0 listens on; None: the one that `address` stands for.
      control: the launcher's folder; None without a launcher.
      attempt: of the launcher, counted from 0.
      cores: to run on; empty: all.
      one_host: whether all processes run on this host; None if nobody said.
      device: the accelerator, among those of this host, that is this process's alone; None: all.
      timeout_s: how long the processes wait for each other at the start.
      names_come_late: whether rank 0's name may be unknown until its host has started.
    """

    rank: int
    size: int
    address: str
    found_by: str
    local_rank: int | None = None
    bind: str | None = None
    control: Path | None = None
    attempt: int = 0
    cores: tuple[int, ...] = ()
    one_host: bool | None = None
    device: int | None = None
    timeout_s: int = _TIMEOUT_S
    names_come_late: bool = False


@dataclass(frozen=True)
class _Claim:
    """What a scheduler says of this process; `address` None if it cannot know one."""

    found_by: str
    rank: int
    size: int
    address: str | None
    local_rank: int
    one_host: bool
    shares_host: bool  # with other processes of the job


def place_of_this_process(environ: Mapping[str, str] = _environ) -> Place | None:
    """The place of this process, from its environment; None for a process on its own.

    Raises:
      UserError: the variables are incomplete, no numbers, or contradict each other.
    """
    given = {name: environ[name] for name in _PLAIN if environ.get(name)}
    claim = None if environ.get(CONTROL) else _claim(environ)  # the launcher knows best
    if not given and claim is None:
        return None
    if claim is not None:
        _refuse_contradiction(environ, given, claim)
        address = given.get(ADDRESS) or claim.address
        if address is None:
            raise UserError(
                f"{claim.found_by} runs this job on several hosts, and does not say where rank 0 "
                f"is; give it with `mpirun -x {ADDRESS}=HOST:PORT`"
            )
        return _place(environ, claim.rank, claim.size, address, claim)
    if ID not in given and environ.get(_POD):
        given[ID] = environ[_POD]
    if missing := [name for name in _PLAIN if name not in given]:
        raise UserError(
            f"{' and '.join(sorted(given))} in the environment, without {' and '.join(missing)}; "
            "expected all three, or none of them for a process on its own"
        )
    rank, size = _number(environ, ID, given[ID]), _number(environ, COUNT, given[COUNT])
    return _place(environ, rank, size, given[ADDRESS], None)


def _place(
    environ: Mapping[str, str], rank: int, size: int, address: str, claim: _Claim | None
) -> Place:
    launched = environ.get(CONTROL)
    local = _optional_number(environ, LOCAL_RANK)
    return Place(
        rank=rank,
        size=size,
        address=address,
        found_by=claim.found_by if claim else "jaxdp.launch" if launched else "JAX's variables",
        local_rank=claim.local_rank if claim else local,
        bind=environ.get(BIND) or None,
        control=Path(launched) if launched else None,
        attempt=_optional_number(environ, ATTEMPT) or 0,
        cores=_cores(environ),
        one_host=claim.one_host if claim else None,
        device=_device(environ, claim) if claim else None,
        timeout_s=_timeout_s(environ),
        names_come_late="KUBERNETES_SERVICE_HOST" in environ,
    )


def _claim(environ: Mapping[str, str]) -> _Claim | None:
    """What Open MPI or Slurm says.

    In an allocation of Slurm, mpirun starts a helper on each node with srun, whose variables its
    processes inherit: then Slurm's are not about them.
    """
    ours, outer = _open_mpi(environ), _slurm(environ)
    if ours is None or outer is None:
        return ours or outer
    helpers = environ.get("SLURM_STEP_NUM_NODES") == environ.get("SLURM_STEP_NUM_TASKS")
    if not helpers and (ours.rank, ours.size) != (outer.rank, outer.size):
        raise UserError(_contradiction(_told(ours), _told(outer)))
    return ours


def _slurm(environ: Mapping[str, str]) -> _Claim | None:
    """A task of a step that srun started with several; SLURM_NTASKS is the allocation's."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(environ.get(name) for name in names):
        return None
    job, step, size, rank = (_number(environ, name) for name in names)
    if size < 2 or step >= _FIRST_SPECIAL_STEP:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    # unlike JAX's, the port counts the step too: an allocation may run several at once
    port = environ.get(PORT) or str(_FIRST_PORT + (job + 97 * step) % _PORTS)
    hosts = _optional_number(environ, "SLURM_STEP_NUM_NODES")
    return _Claim(
        found_by="Slurm",
        rank=rank,
        size=size,
        address=f"{first_host(nodes)}:{port}" if nodes else None,
        local_rank=_optional_number(environ, "SLURM_LOCALID") or 0,
        one_host=hosts == 1,
        shares_host=hosts != size,
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: `gpu03` of `gpu[03-07,9],cpu1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches the empty string too
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def _open_mpi(environ: Mapping[str, str]) -> _Claim | None:
    if not environ.get("OMPI_COMM_WORLD_SIZE") or not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    size, rank = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    if size < 2:
        return None
    here = _optional_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # until version 4
    job = uri or environ.get("PMIX_NAMESPACE", "")
    port = environ.get(PORT) or str(_FIRST_PORT + zlib.crc32(job.split(";")[0].encode()) % _PORTS)
    host = "127.0.0.1" if here == size else _host_of_mpirun(uri)
    return _Claim(
        found_by="Open MPI",
        rank=rank,
        size=size,
        address=f"{host}:{port}" if host else None,
        local_rank=_optional_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") or 0,
        one_host=here == size,
        shares_host=here != 1,
    )


def _host_of_mpirun(uri: str) -> str | None:
    """Where mpirun runs, and rank 0 with it unless hosts were chosen otherwise.

    `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`, or `..;tcp6://[fe80::1,2620::2]:43370`.
    """
    if found := re.search(r"tcp6://\[([^,\]]+)", uri):
        return f"[{found.group(1)}]"
    found = re.search(r"tcp://([^,:]+)", uri)
    return found.group(1) if found else None


def _refuse_contradiction(
    environ: Mapping[str, str], given: Mapping[str, str], claim: _Claim
) -> None:
    own = {COUNT: claim.size, ID: claim.rank}
    for name, number in own.items():
        if name in given and _number(environ, name) != number:
            said = ", ".join(f"{name}={given[name]}" for name in own if name in given)
            raise UserError(_contradiction(said, _told(claim)))


def _told(claim: _Claim) -> str:
    return f"{claim.found_by} says process {claim.rank} of {claim.size}"


def _contradiction(one: str, other: str) -> str:
    return f"{one}, but {other}; leave the place of a process to one of them: unset the other's"


def _device(environ: Mapping[str, str], claim: _Claim) -> int | None:
    """One for each process of a host, as JAX does it.

    Not where the user chose devices, where there is one process per host, and where a process sees
    its own alone, then called 0: Slurm with --gpus-per-task.
    """
    visible = visible_devices(environ)
    sees_all = visible is None or len(visible) > 1
    chosen = chooses_devices(environ)
    return claim.local_rank if claim.shares_host and sees_all and not chosen else None


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that a process may see, as a scheduler lists them; None: all of its host.

    JAX_LOCAL_DEVICE_IDS counts these, from 0.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    return None if text is None else [name for name in text.split(",") if name.strip()]


def chooses_devices(environ: Mapping[str, str]) -> bool:
    """Whether the user chose among the devices that JAX may see."""
    return any(environ.get(name) for name in _CHOICES)


def _cores(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get(CORES, "")
    return tuple(_number(environ, CORES, part) for part in text.split(",")) if text else ()


def _timeout_s(environ: Mapping[str, str]) -> int:
    seconds = _optional_number(environ, TIMEOUT)
    if seconds == 0:
        raise UserError(f"{TIMEOUT}={environ[TIMEOUT]}: expected at least 1 second")
    return _TIMEOUT_S if seconds is None else seconds


def _optional_number(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _number(environ: Mapping[str, str], name: str, text: str | None = None) -> int:
    text = environ[name] if text is None else text
    if not re.fullmatch(r"\d{1,10}", text.strip(), re.ASCII):
        raise UserError(f"{name}={environ.get(name, text)}: expected a whole number")
    return int(text)
