"""Who is part of a job, and who is not, from environments as schedulers make them."""

import pytest

from jaxdp.errors import UserError
from jaxdp.runtime.place import first_host, place_of_this_process

PLAIN = {"JAX_COORDINATOR_ADDRESS": "n1:29500", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
# torchrun's, which JAX does not read either
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n1"}


def slurm(**more):
    """Task 5 of 8, on two hosts, as srun sets it."""
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
    } | more


def open_mpi(**more):
    """Process 1 of 2, on one host, as version 5's mpirun sets it."""
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PMIX_NAMESPACE": "prterun-n1-77@1",
    } | more


def found(environ):
    place = place_of_this_process(environ)
    assert place is not None
    return place


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TORCH,
        {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},  # salloc
        # a batch script and an interactive shell are steps of one task, with numbers of their own
        slurm(SLURM_STEP_ID="4294967291", SLURM_PROCID="0"),
        slurm(SLURM_STEP_ID="4294967290", SLURM_PROCID="0"),
        slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"),  # srun --pty jupyter lab
        open_mpi(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0"),
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed Job of independent runs
        dict.fromkeys(PLAIN, ""),
    ],
)
def test_a_process_on_its_own_is_not_taken_for_one_of_a_job(environ):
    assert place_of_this_process(environ) is None


def test_plain_variables():
    place = found(PLAIN | TORCH)
    assert (place.rank, place.size, place.address) == (2, 4, "n1:29500")
    assert (place.control, place.device, place.one_host) == (None, None, None)


@pytest.mark.parametrize("name", PLAIN)
def test_a_missing_variable_is_named(name):
    environ = {key: value for key, value in PLAIN.items() if key != name}
    with pytest.raises(UserError, match=f"without {name}; expected all three"):
        place_of_this_process(environ)


def test_a_variable_that_is_no_number_is_told():
    with pytest.raises(UserError, match="JAX_NUM_PROCESSES=two: expected a whole number"):
        place_of_this_process(PLAIN | {"JAX_NUM_PROCESSES": "two"})


def test_how_long_processes_wait_for_each_other():
    assert found(PLAIN).timeout_s == 300
    assert found(PLAIN | {"JAXDP_JOIN_TIMEOUT": "12"}).timeout_s == 12
    with pytest.raises(UserError, match="JAXDP_JOIN_TIMEOUT=0: expected at least 1 second"):
        place_of_this_process(PLAIN | {"JAXDP_JOIN_TIMEOUT": "0"})


def test_the_launcher_is_believed_inside_other_schedulers(tmp_path):
    launched = {
        "JAXDP_CONTROL": str(tmp_path),
        "JAXDP_LOCAL_RANK": "1",
        "JAXDP_ATTEMPT": "3",
        "JAXDP_CORES": "2,3",
        "JAXDP_COORDINATOR_BIND": "127.0.0.1",
    }
    place = found(slurm() | PLAIN | launched)
    assert (place.rank, place.size, place.local_rank, place.attempt) == (2, 4, 1, 3)
    assert (place.control, place.cores, place.bind) == (tmp_path, (2, 3), "127.0.0.1")
    assert place.found_by == "jaxdp.launch"


def test_slurm_counts_the_tasks_of_the_step():
    place = found(slurm(SLURM_NTASKS="64"))
    assert (place.rank, place.size, place.local_rank) == (5, 8, 1)
    assert (place.found_by, place.one_host, place.device) == ("Slurm", False, 1)
    assert place.address == f"gpu03:{61440 + 1234 % 4096}"
    assert found(slurm(SLURM_STEP_ID="1")).address != place.address  # steps side by side
    assert found(slurm(JAX_COORDINATOR_PORT="7000")).address == "gpu03:7000"
    assert found(slurm(JAX_COORDINATOR_ADDRESS="10.0.0.1:7")).address == "10.0.0.1:7"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-07,9],cpu1", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack[2-3]-node[10-19]-ib,x", "rack2-node10-ib"),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_open_mpi_on_one_host_needs_no_address():
    place = found(open_mpi())
    assert (place.rank, place.size, place.found_by) == (1, 2, "Open MPI")
    assert place.address.startswith("127.0.0.1:")
    assert place.one_host
    assert found(open_mpi(OMPI_COMM_WORLD_RANK="0")).address == place.address


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1"),
        ("1314521088.0;tcp6://[fe80::b9b:1,2620:10d::2]:43370", "[fe80::b9b:1]"),
    ],
)
def test_open_mpi_4_tells_where_mpirun_runs(uri, host):
    several = open_mpi(OMPI_COMM_WORLD_LOCAL_SIZE="1", OMPI_MCA_orte_hnp_uri=uri)
    assert found(several).address.startswith(f"{host}:")


def test_open_mpi_5_on_several_hosts_needs_an_address():
    several = open_mpi(OMPI_COMM_WORLD_LOCAL_SIZE="1")
    with pytest.raises(UserError, match="mpirun -x JAX_COORDINATOR_ADDRESS"):
        place_of_this_process(several)
    assert found(several | {"JAX_COORDINATOR_ADDRESS": "n1:29500"}).address == "n1:29500"


def test_mpirun_inside_slurm_is_the_inner_one():
    helpers = slurm(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")
    assert found(helpers | open_mpi()).found_by == "Open MPI"
    with pytest.raises(UserError, match="Open MPI says process 1 of 2, but Slurm says process 5"):
        place_of_this_process(slurm() | open_mpi())


def test_an_indexed_job_of_kubernetes_numbers_its_pods():
    environ = {k: v for k, v in PLAIN.items() if k != "JAX_PROCESS_ID"}
    assert found(environ | {"JOB_COMPLETION_INDEX": "3"}).rank == 3
    # the user's own word counts
    assert found(PLAIN | {"JOB_COMPLETION_INDEX": "3"}).rank == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"JAX_NUM_PROCESSES": "4"}, "JAX_NUM_PROCESSES=4, but Slurm says process 5 of 8"),
        ({"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "8"}, "JAX_PROCESS_ID=0, but Slurm"),
    ],
)
def test_a_contradiction_is_refused(given, told):
    with pytest.raises(UserError, match=told):
        place_of_this_process(slurm() | given)


@pytest.mark.parametrize(
    ("more", "device"),
    [
        ({}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),  # --gpus-per-task=1: its own, which it calls 0
        ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, None),
        ({"JAX_CUDA_VISIBLE_DEVICES": "2,3"}, None),
        ({"SLURM_STEP_NUM_NODES": "8"}, None),  # alone on its host: all of them
    ],
)
def test_which_accelerator_is_a_processs_own(more, device):
    assert found(slurm(**more)).device == device
