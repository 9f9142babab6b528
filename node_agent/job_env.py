"""The environment that a job's processes see (names as docs/launcher.md lists them).

Built from a small clean base, never from the agent's own environment as a whole: the agent
may run in a virtual environment or inside Slurm, and its PYTHONPATH or SLURM_* would break
the job. On the base come defaults, then the user's variables, then what the scheduler decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node_agent.attempts import MARK
from protos.messages import LaunchOrder

BASE_NAMES = frozenset(
    {
        "LANG",
        "TZ",
        # Containers and HPC images point to libcuda with it; without it no job would find the GPU.
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    }
)
"""What a job inherits from the agent, beside HOME and PATH and the names that begin with LC_."""
FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHUTDOWN_MARGIN_S = 5.0
"""torchrun must SIGKILL its ranks before we SIGKILL torchrun, or they would become orphans."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where on the node the rank runs, and as whom."""

    attempt_dir: str
    checkpoint_dir: str
    tmp_dir: str
    progress_path: str
    master_port: int
    start_time_s: float
    """UTC seconds since the epoch."""
    python_bin_dir: str
    """Folder of the agent's interpreter: first in PATH, so that `python` and `torchrun` are
    those of the environment that RLTune was installed in."""
    home: str
    login: str
    shell: str


def job_environment(
    order: LaunchOrder, *, node: JobPlace, base_env: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of a rank's command."""
    return {
        **_inherited(base_env, node),
        **_defaults(order),
        **order.env,
        **_rltune_variables(order, node),
        **_gpu_variables(order),
        **_rendezvous(order, node.master_port),
        "TMPDIR": node.tmp_dir,
    }


def processes_per_node(order: LaunchOrder) -> int:
    """How many training processes a node of the job runs: one a GPU, or one without GPUs."""
    return max(1, len(order.gpu_uuids))


def _world_size(order: LaunchOrder) -> int:
    """Training processes of the whole job; nodes may have unequal shares of its GPUs."""
    if order.gpus_by_node:
        return sum(max(1, gpus) for gpus in order.gpus_by_node)
    return processes_per_node(order) * order.nnodes


def _inherited(base_env: Mapping[str, str], node: JobPlace) -> dict[str, str]:
    kept = {k: v for k, v in base_env.items() if k in BASE_NAMES or k.startswith("LC_")}
    return {
        "LANG": "C.UTF-8",
        **kept,
        "HOME": node.home,
        "USER": node.login,
        "LOGNAME": node.login,
        "SHELL": node.shell,
        "PATH": f"{node.python_bin_dir}:{base_env.get('PATH') or FALLBACK_PATH}",
    }


def _defaults(order: LaunchOrder) -> dict[str, str]:
    """What the user may set otherwise."""
    per_node = processes_per_node(order)
    threads = str(max(1, order.cpus // per_node))
    return {
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(THREAD_VARIABLES, threads),
        "NPROC_PER_NODE": str(per_node),
        "PET_NPROC_PER_NODE": str(per_node),
        "WORLD_SIZE": str(_world_size(order)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(max(1, order.grace_s - SHUTDOWN_MARGIN_S))),
    }


def _rltune_variables(order: LaunchOrder, node: JobPlace) -> dict[str, str]:
    limit_s = order.time_limit_s
    timing = {
        "RLTUNE_START_TIME": f"{node.start_time_s:.3f}",
        "RLTUNE_GRACE_S": f"{order.grace_s:g}",
    }
    if limit_s is not None:
        timing["RLTUNE_END_TIME"] = f"{node.start_time_s + limit_s:.3f}"
        timing["RLTUNE_TIME_LIMIT_S"] = f"{limit_s:g}"
    return {
        "RLTUNE_JOB_ID": str(order.rank.job_id),
        "RLTUNE_JOB_NAME": order.name,
        "RLTUNE_ATTEMPT": str(order.rank.attempt),
        "RLTUNE_RESTART_COUNT": str(order.rank.attempt - 1),
        "RLTUNE_SUBMIT_DIR": order.cwd,
        "RLTUNE_USER": order.user,
        "RLTUNE_CLUSTER": order.cluster,
        "RLTUNE_NODELIST": ",".join(order.node_names),
        "RLTUNE_NODE_IPS": ",".join(order.node_addresses),
        "RLTUNE_NNODES": str(order.nnodes),
        "RLTUNE_NODE_RANK": str(order.rank.node_rank),
        "RLTUNE_GPUS_ON_NODE": str(len(order.gpu_uuids)),
        "RLTUNE_GPUS_BY_NODE": ",".join(map(str, order.gpus_by_node)),
        "RLTUNE_GPU_UUIDS": ",".join(order.gpu_uuids),
        "RLTUNE_GPU_NAME": order.gpu_type,
        "RLTUNE_CPUS": str(order.cpus),
        **({"RLTUNE_MEM_MB": str(order.memory_bytes >> 20)} if order.memory_bytes else {}),
        **timing,
        "RLTUNE_CHECKPOINT_DIR": node.checkpoint_dir,
        "RLTUNE_TMPDIR": node.tmp_dir,
        "RLTUNE_PROGRESS_FILE": node.progress_path,
        MARK: node.attempt_dir,
    }


def _gpu_variables(order: LaunchOrder) -> dict[str, str]:
    """By UUID, because CUDA's and NVML's indices differ; the empty string hides every GPU."""
    uuids = ",".join(order.gpu_uuids)
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": uuids,
        "NVIDIA_VISIBLE_DEVICES": uuids or "void",
    }


def _rendezvous(order: LaunchOrder, master_port: int) -> dict[str, str]:
    """Static rendezvous for both readers: torchrun takes PET_* alone, other programs the rest."""
    address = order.node_addresses[0] if order.nnodes > 1 else "127.0.0.1"
    port, nnodes, node_rank = str(master_port), str(order.nnodes), str(order.rank.node_rank)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "NNODES": nnodes,
        "NODE_RANK": node_rank,
        "PET_NNODES": nnodes,
        "PET_NODE_RANK": node_rank,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
        "PET_RDZV_ID": f"{order.rank.job_id}.{order.rank.attempt}",
    }
