"""The MILP's answer against all joint placements, for every solver and every rule.

The oracle tries every place of every job by dynamic programming over what is left of each node.
It shares no code with the allocators: rules and costs are written again from their description.
"""

from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.scheduler.allocator.greedy import GreedyAllocator
from controller.scheduler.allocator.milp.milp import MilpAllocator
from controller.scheduler.allocator.objective import PRESETS, ObjectiveWeights, value_of
from controller.scheduler.allocator.verify import verify
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    Partition,
    RankedJob,
    RunningJob,
    WaitingJob,
)
from controller.solvers import SolverMissing, make_solver
from protos.messages import JobSpec

TYPES = ("A100", "P100", "T4")
NAMES = ("n1", "n2", "n3", "n4", "n5", "n6")
CHECKED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
WEIGHTS = [
    *PRESETS.values(),
    ObjectiveWeights(spread=0.1, fragmentation=0.25, packing=0.0, imbalance=0.5),
]


@st.composite
def nodes(draw, name):
    kinds = st.sampled_from([("P100",), ("P100",), ("A100",), ("T4",), ("A100", "T4"), ()])
    slots = []
    for gpu_type in draw(kinds):
        for _ in range(draw(st.integers(1, 4))):
            state = draw(st.sampled_from(["free", "free", "free", "busy", "lost"]))
            slots.append((gpu_type, state))
    gpus = tuple(
        GpuSlot(f"{name}-{i}", i, gpu_type, state == "free", state != "lost", 16 * len(gpu_type))
        for i, (gpu_type, state) in enumerate(slots)
    )
    return NodeCapacity(
        name,
        accepts_work=draw(st.integers(0, 9)) < 9,
        gpus=gpus,
        cpus_total=16,
        cpus_free=draw(st.sampled_from([2, 5, 16, 16, 16, 16])),
        memory_total_bytes=64,
        memory_free_bytes=draw(st.sampled_from([8, 64, 64])),
        partitions=draw(st.sampled_from([frozenset("a"), frozenset("ab"), frozenset("b")])),
    )


@st.composite
def jobs(draw, job_id, has_partitions):
    count = draw(st.sampled_from([1, 1, 1, 2, 0]))
    gpus = draw(st.sampled_from([1, 1, 2, 3, 4, 0]))
    spec = JobSpec(
        *("j", draw(st.sampled_from(["ada", "bob"])), ("true",), "/"),
        gpus=gpus * count if count else max(1, gpus + draw(st.integers(0, 2))),
        gpu_types=draw(st.sampled_from([(), (), ("P100",), ("T4", "A100"), ("A100", "P100")])),
        nodes=count,
        cpus=draw(st.sampled_from([0, 1, 1, 2, 3])),
        memory_bytes=draw(st.sampled_from([0, 0, 4, 5])),
        partition=draw(st.sampled_from(["a", "b"])) if has_partitions else "",
        min_gpu_memory_bytes=draw(st.sampled_from([0, 0, 0, 40])),
        mix_gpu_types=draw(st.integers(0, 3)) == 3,
    )
    excluded = frozenset([draw(st.sampled_from(NAMES))]) if draw(st.integers(0, 5)) == 5 else ()
    return WaitingJob(job_id, spec, 0.0, 0.0, excluded_nodes=frozenset(excluded))


@st.composite
def instances(draw):
    has_partitions = draw(st.booleans())
    partitions = {}
    if has_partitions:
        limits = st.sampled_from([None, None, None, 3, 6])
        partitions = {name: Partition(name, draw(limits), draw(limits)) for name in "ab"}
    view = ClusterView(
        tuple(draw(nodes(NAMES[i])) for i in range(draw(st.sampled_from([0, 2, 4, 5, 6])))),
        running=(RunningJob(99, "ada", 1, 0.0, None, (), partition="a"),),
        partitions=partitions,
        gpu_speed=draw(st.sampled_from([{}, {}, {"A100": 4.0, "P100": 2.0}, {"T4": 1.0}])),
    )
    queue = [draw(jobs(i, has_partitions)) for i in range(draw(st.sampled_from([1, 3, 4, 5, 6])))]
    return queue, view, draw(st.sampled_from(WEIGHTS))


@st.composite
def contests(draw):
    """GPUs are all that is short, and the jobs want about what is free."""
    view = ClusterView(
        tuple(
            NodeCapacity(
                *(name, True),
                tuple(GpuSlot(f"{name}-{k}", k, gpu_type, k < free) for k in range(4)),
                *(64, 64, 64, 64),
            )
            for name, gpu_type, free in zip(
                NAMES,
                draw(st.sampled_from([("P100",) * 6, ("P100", "P100", "T4", "T4", "A100", "T4")])),
                draw(st.lists(st.integers(1, 4), min_size=3, max_size=6)),
                strict=False,
            )
        )
    )
    wanted = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1)), min_size=3, max_size=6))
    types = st.sampled_from([(), ("P100",), ("T4", "P100"), ("P100", "T4")])
    queue = [
        WaitingJob(
            *(i, JobSpec("j", "u", ("t",), "/", gpus=g, gpu_types=draw(types), nodes=n), 0.0, 0.0)
        )
        for i, (g, n) in enumerate(wanted)
    ]
    return queue, view, draw(st.sampled_from(WEIGHTS))


def oracle(queue, view, weights):
    """The best starts and the least cost for them."""
    kinds, start = [], []
    avoided = frozenset().union(*(job.excluded_nodes for job in queue))
    for node in view.nodes:
        if not node.accepts_work:
            continue
        present = sorted({gpu.gpu_type for gpu in node.gpus})
        capacity = tuple(
            sum(g.gpu_type == t and g.is_in_service for g in node.gpus) for t in present
        )
        free = tuple(sum(g.gpu_type == t and g.is_free for g in node.gpus) for t in present)
        kind = (
            *(tuple(present), capacity, node.partitions),
            node.name if node.name in avoided else "",
        )
        if kind not in kinds:
            kinds.append(kind)
        start.append((kinds.index(kind), free, node.cpus_free, node.memory_free_bytes))
    memory = {}
    for node in view.nodes:
        for gpu in node.gpus:
            memory[gpu.gpu_type] = min(memory.get(gpu.gpu_type, 1000), gpu.memory_bytes)
    quota = {}
    for partition in view.partitions.values():
        used = [job for job in view.running if job.partition == partition.name]
        if partition.max_gpus is not None:
            quota[partition.name, ""] = partition.max_gpus - sum(job.gpus for job in used)
        if partition.max_gpus_per_user is not None:
            for user in ("ada", "bob", "u"):
                mine = sum(job.gpus for job in used if job.user == user)
                quota[partition.name, user] = partition.max_gpus_per_user - mine
    keys = sorted(quota)

    def resting(node):
        kind, free, _, _ = node
        cost = 0.0
        for left, whole in zip(free, kinds[kind][1], strict=True):
            if whole:
                cost += weights.imbalance * ((whole - left) / whole) ** 2
                cost += weights.packing * (whole**2 - left**2)
            cost += weights.fragmentation * (0 < left < whole)
        return cost

    def type_costs(spec):
        """Acceptable types with what each costs."""
        liked = {}
        for t, size in memory.items():
            if size and size < spec.min_gpu_memory_bytes:
                continue
            if not spec.gpu_types:
                liked[t] = 0
            elif t in spec.gpu_types:
                liked[t] = spec.gpu_types.index(t)
        known = [view.gpu_speed[t] for t in liked if t in view.gpu_speed]
        best = max(known, default=1.0)
        return {
            t: weights.type_preference * rank
            + (weights.slowness * (1 - view.gpu_speed.get(t, best) / best) if known else 0.0)
            for t, rank in liked.items()
        }

    def largest(job, gpu_type):
        return max(
            (
                whole
                for kind, _, _, _ in start
                for t, whole in zip(*kinds[kind][:2], strict=True)
                if t == gpu_type and admits(kind, job.spec)
            ),
            default=0,
        )

    def admits(kind, spec):
        return not view.partitions or not spec.partition or spec.partition in kinds[kind][2]

    def cuts(gpus, parts, most):
        if parts == 1:
            return [(gpus,)] if 0 < gpus <= most else []
        return [
            (first, *rest)
            for first in range(1, min(most, gpus) + 1)
            for rest in cuts(gpus - first, parts - 1, most)
        ]

    def shares(job):
        """Every way to cut the job: cost, ((type, GPUs) of each share)."""
        spec = job.spec
        if not spec.gpus:
            yield 0.0, ((None, 0),) * max(1, spec.nodes)
            return
        costs = type_costs(spec)
        mixes = spec.mix_gpu_types and spec.nodes != 1
        for types in [tuple(costs)] if mixes else [(t,) for t in costs]:
            most = max((largest(job, t) for t in types), default=0)
            if not most:
                continue
            fewest = spec.nodes or -(-spec.gpus // most)
            for parts in [fewest] if spec.nodes else [fewest, fewest + 1]:
                if spec.nodes:
                    even = (spec.gpus // parts,) * parts
                    options = [even]
                else:
                    options = cuts(spec.gpus, parts, most)
                for option in options:
                    for chosen in product(types, repeat=parts):
                        cost = sum(
                            costs[t] * k / spec.gpus for t, k in zip(chosen, option, strict=True)
                        )
                        cost += weights.spread * (parts - fewest)
                        yield cost, tuple(sorted(zip(chosen, option, strict=True)))

    ways = [sorted(set(shares(job)), key=str) for job in queue]

    def take(node, gpu_type, gpus, job):
        kind, free, cpus, mem = node
        spec = job.spec
        if not admits(kind, spec) or (kinds[kind][3] and kinds[kind][3] in job.excluded_nodes):
            return None
        if (spec.cpus > cpus and spec.cpus) or (spec.memory_bytes > mem and spec.memory_bytes):
            return None
        if gpus:
            present = kinds[kind][0]
            if gpu_type not in present or free[present.index(gpu_type)] < gpus:
                return None
            at = present.index(gpu_type)
            free = (*free[:at], free[at] - gpus, *free[at + 1 :])
        return (kind, free, cpus - spec.cpus, mem - spec.memory_bytes)

    @cache
    def best(i, left, quotas):
        if i == len(queue):
            return (), -sum(resting(node) for node in left)
        job = queue[i]
        starts, value = best(i + 1, left, quotas)
        found = [((False, *starts), value)]
        binding = [
            n
            for n, (p, u) in enumerate(keys)
            if p == job.spec.partition and u in ("", job.spec.user)
        ]
        if all(quotas[n] >= job.spec.gpus for n in binding):
            after = tuple(q - job.spec.gpus * (n in binding) for n, q in enumerate(quotas))
            for then, cost in places(job, ways[i], left):
                starts, value = best(i + 1, then, after)
                found.append(((True, *starts), value - cost))
        return max(found)

    def places(job, job_ways, left):
        seen = {}
        for cost, parts in job_ways:
            for chosen in combinations(range(len(left)), len(parts)):
                for order in {parts} if len(set(parts)) == 1 else set(permuted(parts)):
                    then, extra = list(left), 0.0
                    for n, (gpu_type, gpus) in zip(chosen, order, strict=True):
                        if not gpus and any(kinds[left[n][0]][1]):
                            extra += weights.cpu_job_on_gpu_node
                        after = take(left[n], gpu_type, gpus, job)
                        if after is None:
                            break
                        then[n] = after
                    else:
                        key = tuple(sorted(then))
                        seen[key] = min(seen.get(key, 1e9), cost + extra)
        return seen.items()

    def permuted(parts):
        if len(parts) < 2:
            return [parts]
        return [
            (part, *rest)
            for i, part in enumerate(parts)
            for rest in permuted((*parts[:i], *parts[i + 1 :]))
        ]

    starts, value = best(0, tuple(sorted(start)), tuple(quota[key] for key in keys))
    return starts, -value


def in_given_order(queue):
    return [RankedJob(job, float(-i)) for i, job in enumerate(queue)]


@pytest.fixture(scope="module", params=["glpk", "glpsol", "highs"])
def solver(request):
    try:
        return make_solver(request.param)
    except SolverMissing as missing:
        pytest.skip(str(missing))


@settings(CHECKED, max_examples=1000)
@given(instance=instances() | contests())
def test_milp_equals_the_best_of_all_joint_placements(solver, instance):
    queue, view, weights = instance
    ranked = in_given_order(queue)
    milp = MilpAllocator(solver, time_limit_s=60.0, weights=weights)
    placement = milp.place(ranked, view, 0.0)
    verify(placement.starts, ranked, view)
    assert (placement.cut_short, placement.fallback) == (False, "")
    value = value_of(placement.starts, ranked, view, weights)
    starts, cost = oracle(queue, view, weights)
    assert value.started == starts
    assert value.cost == pytest.approx(cost, abs=1e-6)
    assert placement.cost == pytest.approx(cost, abs=1e-6)
    greedy = GreedyAllocator(weights).place(ranked, view, 0.0)
    verify(greedy.starts, ranked, view)
    assert not value_of(greedy.starts, ranked, view, weights).is_better_than(value)
