"""The allocator of the RLTune paper and its public code, as a baseline.

One job after the other, each among at most four ways (`ways.candidates`). If there are several, a
mixed-integer program chooses: minimize

    alpha * sum f[n] + beta * (max free - min free) - gamma * sum y[n]

with alpha 1, beta 0.3, gamma 0.5; `f` says that node n is partly free afterwards, `y` that the
next job of the order fits there. As published, the big-M rows tie `f` one way only ("f = 1 needs
a partly free node"), so that minimizing leaves every `f` at 0, and "the next job" is the second
job of the queue whatever pool it belongs to. `mended` ties `f` both ways and takes the next job
that accepts the same pool. See docs/published_allocator.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.scheduler.allocator.milp.solvers import MilpSolver
from controller.scheduler.allocator.ways import PoolNode, Request, Way, candidates, tier_1
from controller.scheduler.index import index_of
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    Placement,
    RankedJob,
    RankPlacement,
    Start,
)

ALPHA, BETA, GAMMA = 1.0, 0.3, 0.5
NO_SOLVER = "no MILP solver is set up"
SOLVE_LIMIT_S = 5.0
"""For one job. The published code has none."""


@dataclass(frozen=True, slots=True)
class PublishedAllocator:
    """Places one job at a time; one that does not fit is skipped."""

    solver: MilpSolver | None
    name: str = "rltune"
    mended: bool = False
    lexicographic: bool = False
    """Takes the first way of tier 1 in order of nodes and shares, without a solver (what the
    published base policies use)."""

    def place(
        self,
        ranked: Sequence[RankedJob],
        cluster: ClusterView,
        now_s: float,  # noqa: ARG002 (protocol)
    ) -> Placement:
        """See `Allocator.place`."""
        return _Placing(self, ranked, cluster).run()


class _Node:
    """What is free on a node while jobs are being placed."""

    def __init__(self, name: str, cpus: int, memory_bytes: int, gpus: Sequence[GpuSlot]) -> None:
        self.name = name
        self.cpus = cpus
        self.memory_bytes = memory_bytes
        self.free: dict[str, list[GpuSlot]] = {}
        self.capacity: dict[str, int] = {}
        for gpu in sorted(gpus, key=lambda gpu: gpu.index):
            if gpu.is_in_service:
                self.capacity[gpu.gpu_type] = self.capacity.get(gpu.gpu_type, 0) + 1
            free = self.free.setdefault(gpu.gpu_type, [])
            if gpu.is_free:
                free.append(gpu)


class _Placing:
    def __init__(
        self, settings: PublishedAllocator, ranked: Sequence[RankedJob], cluster: ClusterView
    ) -> None:
        self.settings = settings
        self.ranked = ranked
        shapes = ShapeIndex(index_of(cluster))
        self.shapes = {entry.job.job_id: shapes.of(entry.job) for entry in ranked}
        self.partitions = {node.name: node.partitions for node in cluster.nodes}
        self.nodes = {
            node.name: _Node(node.name, node.cpus_free, node.memory_free_bytes, node.gpus)
            for node in sorted(cluster.nodes, key=lambda node: node.name)
            if node.accepts_work
        }
        self.started: set[int] = set()
        self.fallback = ""
        self.solve_s = 0.0

    def run(self) -> Placement:
        starts = []
        for position, entry in enumerate(self.ranked):
            shape = self.shapes[entry.job.job_id]
            start = self._start(entry.job.job_id, shape, position)
            if start is not None:
                self.started.add(start.job_id)
                starts.append(start)
        return Placement(tuple(starts), fallback=self.fallback, solve_s=self.solve_s)

    def _start(self, job_id: int, shape: JobShape, position: int) -> Start | None:
        if not shape.gpus:
            return self._start_without_gpus(job_id, shape)
        for gpu_type in shape.gpu_types:
            pool = self._pool(shape, gpu_type)
            request = Request(shape.gpus, shape.nodes)
            if self.settings.lexicographic:
                ways = sorted(tier_1(request, pool), key=lambda way: way.gpus)[:1]
            else:
                ways = candidates(request, pool)
            if ways:
                chosen = ways[0]
                if len(ways) > 1:
                    chosen = self._choose(ways, pool, self._next_gpus(position, gpu_type))
                return Start(job_id, self._book(shape, gpu_type, chosen), _terms(chosen))
        return None

    def _start_without_gpus(self, job_id: int, shape: JobShape) -> Start | None:
        room = [node for node in self.nodes.values() if self._admits(node, shape)]
        count = max(1, shape.nodes)
        if len(room) < count:
            return None
        for node in room[:count]:
            node.cpus -= shape.cpus
            node.memory_bytes -= shape.memory_bytes
        return Start(job_id, tuple(RankPlacement(node.name, (), ()) for node in room[:count]))

    def _admits(self, node: _Node, shape: JobShape) -> bool:
        return (
            node.name not in shape.excluded_nodes
            and (not shape.partition or shape.partition in self.partitions[node.name])
            and (not shape.cpus or node.cpus >= shape.cpus)
            and (not shape.memory_bytes or node.memory_bytes >= shape.memory_bytes)
        )

    def _pool(self, shape: JobShape, gpu_type: str) -> list[PoolNode]:
        return [
            PoolNode(node.name, len(node.free[gpu_type]), node.capacity[gpu_type])
            for node in self.nodes.values()
            if node.capacity.get(gpu_type) and self._admits(node, shape)
        ]

    def _next_gpus(self, position: int, gpu_type: str) -> int:
        """GPUs on one node of the job that the choice looks ahead to; 0 if there is none."""
        if self.settings.mended:
            later = (self.shapes[entry.job.job_id] for entry in self.ranked[position + 1 :])
            ahead = next((shape for shape in later if gpu_type in shape.gpu_types), None)
        else:
            waiting = [e for e in self.ranked if e.job.job_id not in self.started]
            ahead = self.shapes[waiting[1].job.job_id] if len(waiting) > 1 else None
        return 0 if ahead is None else ahead.gpus // (ahead.nodes or 1)

    def _choose(self, ways: Sequence[Way], pool: Sequence[PoolNode], next_gpus: int) -> Way:
        if self.settings.solver is None:
            self.fallback = NO_SOLVER
            return ways[0]
        from controller.scheduler.allocator.published_model import (  # noqa: PLC0415 (Pyomo)
            build_model,
        )

        model, picks = build_model(ways, pool, next_gpus, mended=self.settings.mended)
        solution = self.settings.solver.solve(model, picks, SOLVE_LIMIT_S)
        self.solve_s += solution.elapsed_s
        if not solution.has_values:
            self.fallback = f"the solver gave no answer for a job: {solution.message}"
            return ways[0]
        return ways[max(range(len(ways)), key=lambda w: solution.values[w])]

    def _book(self, shape: JobShape, gpu_type: str, way: Way) -> tuple[RankPlacement, ...]:
        ranks = []
        for name, gpus in way.gpus:
            node = self.nodes[name]
            taken, node.free[gpu_type] = node.free[gpu_type][:gpus], node.free[gpu_type][gpus:]
            node.cpus -= shape.cpus
            node.memory_bytes -= shape.memory_bytes
            ranks.append(
                RankPlacement(
                    name, tuple(gpu.uuid for gpu in taken), tuple(gpu.index for gpu in taken)
                )
            )
        return tuple(ranks)


def _terms(way: Way) -> dict[str, float]:
    return {
        "partly_used_nodes": float(way.fragmentation),
        "waste_gpus": float(way.waste),
        "utilization_variance": way.variance,
    }


def rltune(solver: MilpSolver | None, name: str = "rltune") -> PublishedAllocator:
    """The published allocator by name: `rltune`, `rltune-mended` or `rltune-tier1`."""
    plain = PublishedAllocator(solver, name)
    return replace(plain, mended=name == "rltune-mended", lexicographic=name == "rltune-tier1")
