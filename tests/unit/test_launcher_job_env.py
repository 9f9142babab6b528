"""The environment of a job, as a pure function of order, node and base."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node_agent.job_env import JobPlace, job_environment
from protos.messages import LaunchOrder, RankId

ORDER = LaunchOrder(
    rank=RankId(12, 3, 1),
    name="a 'name'\nwith newline",
    user="ann",
    argv=("true",),
    env={},
    cwd="/home/ann/project",
    gpu_uuids=("GPU-b", "GPU-a"),
    gpu_type="P100",
    cpus=8,
    memory_bytes=4 << 30,
    time_limit_s=3600.0,
    grace_s=30.0,
    node_names=("n0", "n1"),
    node_addresses=("10.0.0.1", "10.0.0.2"),
    master_port=23456,
    cluster="lab",
    gpus_by_node=(2, 2),
)
PLACE = JobPlace(
    attempt_dir="/state/attempts/12.3.1",
    checkpoint_dir="/state/checkpoints/12",
    tmp_dir="/tmp/rltune-12.3.1-x",
    progress_path="/state/attempts/12.3.1/progress.jsonl",
    master_port=23456,
    start_time_s=1000.5,
    python_bin_dir="/opt/env/bin",
    home="/root",
    login="root",
    shell="/bin/sh",
)


def environment(base_env=None, **changes):
    return job_environment(replace(ORDER, **changes), node=PLACE, base_env=base_env or {})


def test_every_variable_of_a_two_node_gpu_job():
    assert environment() == {
        "LANG": "C.UTF-8",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/sh",
        "PATH": "/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
        "NUMEXPR_NUM_THREADS": "4",
        "NPROC_PER_NODE": "2",
        "PET_NPROC_PER_NODE": "2",
        "WORLD_SIZE": "4",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "25",
        "RLTUNE_JOB_ID": "12",
        "RLTUNE_JOB_NAME": "a 'name'\nwith newline",
        "RLTUNE_ATTEMPT": "3",
        "RLTUNE_RESTART_COUNT": "2",
        "RLTUNE_SUBMIT_DIR": "/home/ann/project",
        "RLTUNE_USER": "ann",
        "RLTUNE_CLUSTER": "lab",
        "RLTUNE_NODELIST": "n0,n1",
        "RLTUNE_NODE_IPS": "10.0.0.1,10.0.0.2",
        "RLTUNE_NNODES": "2",
        "RLTUNE_NODE_RANK": "1",
        "RLTUNE_GPUS_ON_NODE": "2",
        "RLTUNE_GPUS_BY_NODE": "2,2",
        "RLTUNE_GPU_UUIDS": "GPU-b,GPU-a",
        "RLTUNE_GPU_NAME": "P100",
        "RLTUNE_CPUS": "8",
        "RLTUNE_MEM_MB": "4096",
        "RLTUNE_START_TIME": "1000.500",
        "RLTUNE_END_TIME": "4600.500",
        "RLTUNE_TIME_LIMIT_S": "3600",
        "RLTUNE_GRACE_S": "30",
        "RLTUNE_CHECKPOINT_DIR": "/state/checkpoints/12",
        "RLTUNE_TMPDIR": "/tmp/rltune-12.3.1-x",
        "TMPDIR": "/tmp/rltune-12.3.1-x",
        "RLTUNE_PROGRESS_FILE": "/state/attempts/12.3.1/progress.jsonl",
        "RLTUNE_ATTEMPT_DIR": "/state/attempts/12.3.1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "23456",
        "NNODES": "2",
        "NODE_RANK": "1",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "23456",
        "PET_RDZV_ID": "12.3",
    }


def test_no_gpu_asked_none_visible():
    env = environment(gpu_uuids=(), gpu_type="", env={"CUDA_VISIBLE_DEVICES": "0"})

    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert env["NPROC_PER_NODE"] == "1"
    assert env["RLTUNE_GPUS_ON_NODE"] == "0"


def test_single_node_needs_no_network():
    env = environment(rank=RankId(1, 1), node_names=("n0",), node_addresses=("10.0.0.1",))

    assert env["MASTER_ADDR"] == env["PET_MASTER_ADDR"] == "127.0.0.1"


def test_what_was_not_asked_for_is_absent():
    env = environment(time_limit_s=None, memory_bytes=0)

    assert not {"RLTUNE_END_TIME", "RLTUNE_TIME_LIMIT_S", "RLTUNE_MEM_MB"} & env.keys()


def test_the_agents_own_environment_does_not_leak():
    base_env = {
        "PYTHONPATH": "/agent",
        "VIRTUAL_ENV": "/agent/.venv",
        "SLURM_JOB_ID": "7",
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "PET_NNODES": "9",
        "RANK": "5",
        "SECRET_TOKEN": "s",
        "PATH": "/agent/bin:/bin",
        "LANG": "de_DE.UTF-8",
        "LC_ALL": "C",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
        "https_proxy": "http://proxy:3128",
    }
    env = environment(base_env)
    inherited = {key: value for key, value in env.items() if base_env.get(key) == value}

    assert inherited == {
        "LANG": "de_DE.UTF-8",
        "LC_ALL": "C",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
        "https_proxy": "http://proxy:3128",
    }
    assert env["PATH"] == "/opt/env/bin:/agent/bin:/bin"
    assert env["PET_NNODES"] == "2"
    assert "RANK" not in env


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONPATH", "SLURM_JOB_ID"]
)
def test_the_user_may_set(name):
    assert environment(env={name: "mine"})[name] == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "RLTUNE_JOB_ID",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "MASTER_PORT",
        "PET_NNODES",
        "TMPDIR",
    ],
)
def test_the_scheduler_decides(name):
    assert environment(env={name: "mine"})[name] != "mine"


@pytest.mark.parametrize(
    ("grace_s", "shutdown"), [(30.0, "25"), (3.0, "1"), (0.0, "1"), (10.9, "5")]
)
def test_torchrun_kills_its_ranks_before_we_kill_torchrun(grace_s, shutdown):
    assert environment(grace_s=grace_s)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == shutdown


@pytest.mark.parametrize(("cpus", "gpus", "threads"), [(8, 3, "2"), (1, 4, "1"), (6, 0, "6")])
def test_threads_share_the_cpus(cpus, gpus, threads):
    uuids = tuple(f"GPU-{i}" for i in range(gpus))
    assert environment(cpus=cpus, gpu_uuids=uuids)["OMP_NUM_THREADS"] == threads


def test_shares_need_not_be_equal():
    env = environment(gpu_uuids=("GPU-a",), gpus_by_node=(3, 1))
    assert (env["PET_NPROC_PER_NODE"], env["WORLD_SIZE"]) == ("1", "4")
    assert env["RLTUNE_GPUS_BY_NODE"] == "3,1"
