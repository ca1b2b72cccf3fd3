"""The shipped files for Slurm and Kubernetes, as far as they can be tried without a cluster."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from jaxdp.config import check_devices, load_config, parse_args
from jaxdp.errors import Exit
from jaxdp.runtime.place import place_of_this_process
from jaxdp.runtime.restarting import FINAL

FILES = Path(__file__).parent.parent.parent / "configs" / "cluster"
SBATCH = FILES / "slurm.sbatch"

# starts the command after its options as tasks 0 and 1 of a step; ends with their highest code
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do echo "option $1"; shift; done
for task in 0 1; do
  SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST='n[1-2]' \
    SLURM_PROCID=$task SLURM_LOCALID=0 "$@"
  ended=$?
  [ "$ended" -le "${code:-0}" ] || code=$ended
done
exit ${code:-0}
"""
# stands for Python: says where it stands, and what it was to run
PROGRAM = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from jaxdp.runtime.place import place_of_this_process
place = place_of_this_process()
print("task", place.rank, place.size, place.address, *sys.argv[1:])
sys.exit(int(os.environ["CODES"].split()[place.rank]))
"""


@pytest.fixture
def submit(tmp_path):
    """(arguments, **environment) -> the batch script run with a stand-in for each of Slurm's."""
    root = str(FILES.parent.parent)
    programs = {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "scontrol $*"\n',
        "python": PROGRAM.format(python=sys.executable, root=root),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def submit(*arguments, **environment):
        return subprocess.run(
            ["bash", SBATCH, *arguments],
            env={
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "JAXDP_PYTHON": str(tmp_path / "python"),
                "SLURM_JOB_ID": "77",
                "SLURM_NTASKS": "8",
                "SLURM_SUBMIT_DIR": root,
                **environment,
            },
            capture_output=True,
            text=True,
        )

    return submit


def test_slurm_starts_every_task_with_the_same_command(submit):
    ended = submit("--config", "configs/gpt_tiny.yaml", CODES="0 0")
    command = "-m jaxdp.train --config configs/gpt_tiny.yaml --resume auto"
    tasks = [line for line in ended.stdout.splitlines() if line.startswith("task")]
    assert tasks == [f"task {r} 2 n1:{61440 + 77} {command}" for r in (0, 1)]
    assert "option --kill-on-bad-exit=0" in ended.stdout
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "scontrol" not in ended.stdout


@pytest.mark.parametrize(
    ("codes", "restarts", "again"),
    [
        ("75 75", "5", True),
        ("75 6", "5", True),
        ("6 6", "", True),
        ("6 6", "3", False),
        ("137 6", "", True),  # a rank was killed: its code hides that of the others
        ("6 137", "2", True),
        ("6 139", "3", False),
        ("2 2", "", False),
        ("4 4", "", False),
        ("1 1", "", False),
    ],
)
def test_slurm_puts_back_what_may_go_on(submit, codes, restarts, again):
    ended = submit(CODES=codes, SLURM_RESTART_COUNT=restarts)
    assert ended.returncode == max(map(int, codes.split()))
    assert ("scontrol requeue 77" in ended.stdout) == again


def test_slurms_example_fits_its_tasks(monkeypatch):
    [example] = re.findall(
        r"^# +sbatch configs/cluster/slurm.sbatch (.*)$", SBATCH.read_text(), re.M
    )
    monkeypatch.chdir(FILES.parent.parent)
    args = parse_args(example.split(), "train")
    config = load_config(args.config_path, args.overrides)
    tasks = int(sbatch_options()["nodes"]) * int(sbatch_options()["ntasks-per-node"])
    assert isinstance(config.devices, int)
    assert config.devices % tasks == 0
    assert not check_devices(config, config.devices)


def sbatch_options():
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SBATCH.read_text(), re.MULTILINE))


def test_the_batch_script_itself_is_a_process_on_its_own():
    options = sbatch_options()
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) > 1
    assert options["signal"] == "TERM@120"  # to the tasks; B: would be to the script
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert place_of_this_process(batch) is None


@pytest.fixture(scope="module")
def jobset():
    return YAML(typ="safe").load((FILES / "jobset.yaml").read_text())


@pytest.fixture(scope="module")
def job(jobset):
    (workers,) = jobset["spec"]["replicatedJobs"]
    assert workers["replicas"] == 1  # ranks are indices in one Job
    return workers["template"]["spec"]


def test_jobset_has_what_its_schema_requires(jobset, job):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["network"] == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,  # pods look for pod 0 before any is ready
    }
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert job["backoffLimit"] == 0  # one lost pod starts all again, not itself alone
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # pod failure policies ask for it
    (container,) = pod["containers"]
    (policy,) = job["podFailurePolicy"]["rules"]
    assert policy["onExitCodes"]["containerName"] == container["name"]
    final = set(FINAL) - {Exit.DONE, Exit.SAVED}  # as the launcher has it
    assert policy["onExitCodes"]["values"] == sorted(map(int, final))
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_jobset_tells_every_pod_its_place(jobset, job):
    (container,) = job["template"]["spec"]["containers"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    for rank in range(job["completions"]):
        environ = {"JOB_COMPLETION_INDEX": str(rank), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert source in (None, index)
            environ[variable["name"]] = str(rank) if source else variable["value"]
        place = place_of_this_process(environ)
        assert (place.rank, place.size) == (rank, job["parallelism"])
        # JobSet calls a pod <set>-<job>-<number of the job>-<index>.<set>
        name = jobset["metadata"]["name"]
        workers = jobset["spec"]["replicatedJobs"][0]["name"]
        assert place.address.partition(":")[0] == f"{name}-{workers}-0-0.{name}"
        assert place.names_come_late


def test_jobset_runs_a_command_that_exists(job, monkeypatch):
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "jaxdp.train"]
    monkeypatch.chdir(FILES.parent.parent)
    args = parse_args(container["args"], "train")
    assert load_config(args.config_path, args.overrides).resume == "auto"
