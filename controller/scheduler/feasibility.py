"""Whether any known node could ever hold a job, empty and in service."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from controller.scheduler.shape import acceptable_types
from controller.scheduler.types import ClusterView, NodeCapacity
from protos.messages import JobSpec

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class _Pool:
    """GPUs of one type on one node; type `` for jobs without GPUs."""

    node: NodeCapacity
    gpu_type: str
    gpus: int


def never_fits(spec: JobSpec, cluster: ClusterView) -> str | None:
    """Why no known node could ever hold the job, and how to mend it; None if some could.

    Nodes count whether they are up or not, with all their GPUs, CPUs and memory: this is about
    what the cluster is, not about its present state. None as well while no node is known.
    """
    if not cluster.nodes:
        return None
    nodes = _nodes_of(spec.partition, cluster)
    if not nodes:
        return f"no node is in partition {spec.partition}; `rltune partitions` shows what there is"
    if spec.gpus == 0:
        return _too_few(spec, [_Pool(node, "", 0) for node in nodes])
    quota = _beyond_quota(spec, cluster)
    if quota is not None:
        return quota
    memory = _memory_by_type(nodes)
    if not memory:
        return f"no node{_in(spec)} has a GPU; ask --gpus 0"
    choices = acceptable_types(spec.gpu_types, memory)
    if not choices:
        asked = " or ".join(spec.gpu_types)
        return f"no node{_in(spec)} has GPU type {asked}; types here: {', '.join(sorted(memory))}"
    large = [c.gpu_type for c in choices if memory[c.gpu_type] >= spec.min_gpu_memory_bytes]
    if not large:
        most = max(memory[choice.gpu_type] for choice in choices)
        return (
            f"no such GPU{_in(spec)} has {_gib(spec.min_gpu_memory_bytes)} of memory; the largest "
            f"has {_gib(most)}; ask for less with --gpu-mem"
        )
    pools = [_pools(nodes, gpu_type) for gpu_type in large]
    if spec.mix_gpu_types:
        pools = [[pool for of_type in pools for pool in of_type]]
    reasons = [_too_few(spec, of_type) for of_type in pools]
    if None in reasons:
        return None
    if spec.gpu_types:
        return "; ".join(reason for reason in reasons if reason)
    largest = max(range(len(pools)), key=lambda i: max(pool.gpus for pool in pools[i]))
    return reasons[largest]


def _nodes_of(partition: str, cluster: ClusterView) -> list[NodeCapacity]:
    if not partition or not cluster.partitions:
        return list(cluster.nodes)
    return [node for node in cluster.nodes if partition in node.partitions]


def _in(spec: JobSpec) -> str:
    return f" of partition {spec.partition}" if spec.partition else ""


def _beyond_quota(spec: JobSpec, cluster: ClusterView) -> str | None:
    partition = cluster.partitions.get(spec.partition)
    if partition is None:
        return None
    for most, whose in (
        (partition.max_gpus, "all its jobs together"),
        (partition.max_gpus_per_user, "the jobs of one user"),
    ):
        if most is not None and spec.gpus > most:
            return (
                f"needs {spec.gpus} GPUs; partition {spec.partition} allows {most} for {whose}; "
                f"ask --gpus {most} or fewer"
            )
    return None


def _memory_by_type(nodes: list[NodeCapacity]) -> dict[str, float]:
    """The memory of a GPU of each type; a type of unknown size counts as large enough."""
    memory: dict[str, float] = {}
    for node in nodes:
        for gpu in node.gpus:
            size = gpu.memory_bytes or inf
            memory[gpu.gpu_type] = min(memory.get(gpu.gpu_type, inf), size)
    return memory


def _pools(nodes: list[NodeCapacity], gpu_type: str) -> list[_Pool]:
    counts = [(node, sum(g.gpu_type == gpu_type for g in node.gpus)) for node in nodes]
    return [_Pool(node, gpu_type, count) for node, count in counts if count]


def _too_few(spec: JobSpec, pools: list[_Pool]) -> str | None:
    """What the pools of one GPU type lack for the job."""
    if spec.gpus and not spec.nodes:
        return _too_few_for_any_cut(spec, pools)
    large = [pool for pool in pools if pool.gpus >= spec.gpus_per_node]
    if not large:
        return _no_large_node(spec, pools)
    with_cpus = [pool for pool in large if pool.node.cpus_total >= spec.cpus]
    if not with_cpus:
        best = max(large, key=lambda pool: pool.node.cpus_total).node
        return (
            f"needs {spec.cpus} CPUs on {_one_node(spec, pools)}; the largest ({best.name}) has "
            f"{best.cpus_total}; ask --cpus {best.cpus_total} or fewer"
        )
    roomy = [pool for pool in with_cpus if pool.node.memory_total_bytes >= spec.memory_bytes]
    if not roomy:
        best = max(with_cpus, key=lambda pool: pool.node.memory_total_bytes).node
        return (
            f"needs {_gib(spec.memory_bytes)} of memory on {_one_node(spec, pools)}; the largest "
            f"({best.name}) has {_gib(best.memory_total_bytes)}; ask for less with --mem"
        )
    if len(roomy) >= spec.nodes:
        return None
    have = len(roomy)
    if spec.gpus:
        each = _gpus(spec.gpus_per_node, pools[0].gpu_type)
        ask = f"--nodes {have} --gpus {have * spec.gpus_per_node}"
    else:
        each = f"{spec.cpus} CPU{'s' if spec.cpus != 1 else ''}"
        ask = f"--nodes {have}"
    return (
        f"needs {spec.nodes} nodes with {each} each; the cluster has {have} of that kind; ask {ask}"
    )


def _too_few_for_any_cut(spec: JobSpec, pools: list[_Pool]) -> str | None:
    """As `_too_few`, for a job over as few nodes as possible, or one more."""
    roomy = [
        pool
        for pool in pools
        if pool.node.cpus_total >= spec.cpus and pool.node.memory_total_bytes >= spec.memory_bytes
    ]
    sizes = sorted((pool.gpus for pool in roomy), reverse=True)
    nodes = -(-spec.gpus // sizes[0]) + 1 if sizes else 0
    if sizes and sum(sizes[:nodes]) >= spec.gpus:
        return None
    if not sizes:
        return (
            f"needs {spec.cpus} CPUs and {_gib(spec.memory_bytes)} of memory on each node; no node "
            f"with {pools[0].gpu_type} has that; ask for less with --cpus or --mem"
        )
    return (
        f"needs {_gpus(spec.gpus, pools[0].gpu_type)} on at most {nodes} nodes; the largest so "
        f"many have {sum(sizes[:nodes])}; ask fewer GPUs"
    )


def _no_large_node(spec: JobSpec, pools: list[_Pool]) -> str:
    largest = max(pools, key=lambda pool: pool.gpus)
    ways = []
    for nodes in range(spec.nodes + 1, len(pools) + 1):
        share, odd = divmod(spec.gpus, nodes)
        if not odd and sum(pool.gpus >= share for pool in pools) >= nodes:
            ways.append(f"--nodes {nodes}")
            break
    ways.append(f"--gpus {largest.gpus * spec.nodes}" if spec.nodes <= len(pools) else "fewer GPUs")
    return (
        f"needs {_gpus(spec.gpus_per_node, largest.gpu_type)} on one node; the largest node "
        f"({largest.node.name}) has {largest.gpus} {largest.gpu_type}; ask {' or '.join(ways)}"
    )


def _one_node(spec: JobSpec, pools: list[_Pool]) -> str:
    if not spec.gpus:
        return "one node"
    return f"one node with {_gpus(spec.gpus_per_node, pools[0].gpu_type)}"


def _gpus(count: int, gpu_type: str) -> str:
    return f"{count} {gpu_type}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:,.1f} GiB"
