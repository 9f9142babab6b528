"""Joint placement of the first jobs of the order: exact, and never worse than greedy.

The objective is `allocator.objective`: starts decide in the order of the queue, then cost. A
weight for each job that dominates all later ones cannot be written in floating point for 64
jobs, so the order is settled in steps:

1. Greedy's answer is the incumbent. Each job that it starts before the first one it skips does
   start in the optimum.
2. A skipped job that would fit alone is in question. It and the next such jobs, `BLOCK` at most,
   form a block with the weights 2^(BLOCK-1), ..., 2, 1; jobs settled before must start. The sum of
   weights is an integer of at most 2^BLOCK - 1 = 255, so the solver's relative gap of 1e-3 leaves
   less than 0.26 of doubt, and the cost's part (0.5 at most) cannot turn it: the block's starts
   are exact. Its answer, completed by greedy, is the next incumbent.
3. When every job is settled, the cost is minimized with exactly these starts.

The solver is not asked where the answer is known: a job that fits nowhere or for which too few
GPUs are left, everything fits at a cost that is provably least, a single job to start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from controller.scheduler.allocator.greedy import book, pack
from controller.scheduler.allocator.milp.bounds import (
    cheapest_place,
    cost_lower_bound,
    lacks_gpus,
)
from controller.scheduler.allocator.milp.classes import classify, group_jobs
from controller.scheduler.allocator.milp.expand import Place, UnusableAnswer, expand, to_integers
from controller.scheduler.allocator.milp.network import NetworkTooLarge, build_network
from controller.scheduler.allocator.milp.solvers import MilpSolver, Solution, SolveStatus
from controller.scheduler.allocator.objective import (
    TOLERANCE,
    ObjectiveValue,
    ObjectiveWeights,
    evaluate,
)
from controller.scheduler.ledger import Ledger
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import ClusterView, Placement, RankedJob, Start, WaitingJob

BLOCK = 8
"""Jobs whose starts are settled by one solve (see the module's docstring for the bound)."""


@dataclass(frozen=True, slots=True)
class MilpAllocator:
    """Places the first `window` jobs jointly; later ones greedily into what is left."""

    solver: MilpSolver | None
    no_solver: str = "no MILP solver is set up"
    """Why there is none, for `Placement.fallback`."""
    window: int = 64
    time_limit_s: float = 0.2
    """For all solves of one decision together."""
    weights: ObjectiveWeights = field(default_factory=ObjectiveWeights)
    name: str = "milp"

    def place(
        self,
        ranked: Sequence[RankedJob],
        cluster: ClusterView,
        now_s: float,  # noqa: ARG002 (protocol)
    ) -> Placement:
        """The best joint placement found within the limit."""
        return _Search(self, ranked, cluster).run()


class _Stopped(Exception):
    """The solver gave no answer; the reason is noted in the search."""


class _Search:
    """One decision: the incumbent, what is settled, what the solver may still spend."""

    def __init__(
        self, settings: MilpAllocator, ranked: Sequence[RankedJob], cluster: ClusterView
    ) -> None:
        self.settings = settings
        self.ranked = ranked
        self.cluster = cluster
        self.shapes = ShapeIndex(cluster)
        self.free = Ledger(cluster)
        """As the cluster is before any start; never booked."""
        self.candidates = self._that_fit_alone([r.job for r in ranked[: settings.window]])
        self.starts = pack(self.candidates, Ledger(cluster), self.shapes)
        """The incumbent."""
        self.left_s = settings.time_limit_s
        self.cut_short = False
        self.fallback = ""

    def run(self) -> Placement:
        greedy = pack([r.job for r in self.ranked], Ledger(self.cluster), self.shapes)
        with suppress(_Stopped):  # then the incumbent stands; cut_short or fallback says why
            self._reduce_cost(self._settle_starts())
        best = self._with_the_rest(self.starts)
        value, greedy_value = self._value(best), self._value(greedy)
        if greedy_value.is_better_than(value):
            best, value = greedy, greedy_value
        return Placement(tuple(best), value.as_float(), self.cut_short, self.fallback)

    def _that_fit_alone(self, jobs: Sequence[WaitingJob]) -> list[WaitingJob]:
        fits: dict[JobShape, bool] = {}
        for job in jobs:
            shape = self.shapes.of(job)
            if shape not in fits:
                fits[shape] = self.free.fits(shape)
        return [job for job in jobs if fits[self.shapes.of(job)]]

    def _settle_starts(self) -> list[WaitingJob]:
        """Finds which candidates start in the optimum; the incumbent then starts exactly them."""
        settled: list[WaitingJob] = []
        rejected: list[JobShape] = []
        position = 0
        while position < len(self.candidates):
            job = self.candidates[position]
            if job.job_id in self._started():
                settled.append(job)
                position += 1
                continue
            block, position = self._next_block(position, settled, rejected)
            if not block:
                continue
            going = self._solve_block(settled, block, self.candidates[position:])
            settled += [job for job in block if job.job_id in going]
            rejected += [self.shapes.of(job) for job in block if job.job_id not in going]
        return settled

    def _next_block(
        self, position: int, settled: Sequence[WaitingJob], rejected: Sequence[JobShape]
    ) -> tuple[list[WaitingJob], int]:
        """The next jobs in question, and the position after the last job that was looked at."""
        certain = [self.shapes.of(job) for job in settled]
        block: list[WaitingJob] = []
        while position < len(self.candidates) and len(block) < BLOCK:
            job = self.candidates[position]
            if not block and job.job_id in self._started():
                break
            shape = self.shapes.of(job)
            position += 1
            if any(shape.is_at_least(other) for other in rejected):
                continue
            if shape.gpus and lacks_gpus(self.free, shape, certain):
                continue
            block.append(job)
        return block, position

    def _solve_block(
        self,
        settled: Sequence[WaitingJob],
        block: Sequence[WaitingJob],
        later: Sequence[WaitingJob],
    ) -> set[int]:
        """Settles a block: which of its jobs start. Makes the incumbent agree with that."""
        weights = {job.job_id: 2.0 ** (BLOCK - 1 - i) for i, job in enumerate(block)}
        places, is_proven = self._solve([*settled, *block], weights)
        going = {job.job_id for job in block if job.job_id in places}
        kept = {job.job_id for job in block} & self._started()
        if going != kept:
            starts, ledger = self._book(places)
            starts += pack(later, ledger, self.shapes)
            if self._value(starts).is_better_than(self._value(self.starts)):
                self.starts = starts
        if not is_proven:
            raise _Stopped
        return going

    def _reduce_cost(self, settled: Sequence[WaitingJob]) -> None:
        """Finds the cheapest placement that starts exactly the settled jobs."""
        if not settled:
            return
        shapes = [self.shapes.of(job) for job in settled]
        if len(settled) == 1:
            gpu_type, nodes = cheapest_place(self.free, shapes[0], self.settings.weights)
            places = {settled[0].job_id: Place(gpu_type, tuple(node.name for node in nodes))}
            self._take_if_better(places)
            return
        least = cost_lower_bound(self.free, shapes, self.settings.weights)
        if self._value(self.starts).cost <= least + TOLERANCE:
            return
        places, _ = self._solve(settled, {})
        self._take_if_better(places)

    def _solve(
        self, jobs: Sequence[WaitingJob], start_weights: Mapping[int, float]
    ) -> tuple[dict[int, Place], bool]:
        """Places for the jobs that start, and whether that is proven to be the optimum.

        Raises:
            _Stopped: there is no answer.
        """
        groups = group_jobs(jobs, self.shapes)
        try:
            network = build_network(classify(self.free, groups), groups)
        except NetworkTooLarge:
            self.cut_short = True
            raise _Stopped from None
        from controller.scheduler.allocator.milp.model import (  # noqa: PLC0415 (loads Pyomo)
            build_model,
        )

        model = build_model(network, start_weights, self.settings.weights)
        solution = self._run_solver(model.model, model.variables)
        try:
            values = to_integers(solution.values)
            flows = values[: len(network.arcs)]
            going = zip(start_weights, values[len(network.arcs) :], strict=True)
            starting = {job.job_id for job in jobs} - {job_id for job_id, go in going if not go}
            return expand(network, flows, starting), solution.status is SolveStatus.OPTIMAL
        except UnusableAnswer as error:
            self.fallback = f"the solver's answer cannot be used: {error}"
            raise _Stopped from error

    def _run_solver(self, model: object, variables: Sequence[object]) -> Solution:
        if self.settings.solver is None:
            self.fallback = self.settings.no_solver
            raise _Stopped
        if self.left_s <= 0:
            self.cut_short = True
            raise _Stopped
        solution = self.settings.solver.solve(model, variables, self.left_s)
        self.left_s -= solution.elapsed_s
        self.cut_short |= solution.status in {SolveStatus.FEASIBLE, SolveStatus.LIMIT}
        if solution.status is SolveStatus.ERROR:
            self.fallback = solution.message
        if solution.status is SolveStatus.INFEASIBLE:
            self.fallback = "the solver found a model infeasible that has a solution"
        if not solution.has_values:
            raise _Stopped
        return solution

    def _take_if_better(self, places: Mapping[int, Place]) -> None:
        starts, _ = self._book(places)
        if self._value(starts).is_better_than(self._value(self.starts)):
            self.starts = starts

    def _book(self, places: Mapping[int, Place]) -> tuple[list[Start], Ledger]:
        ledger = Ledger(self.cluster)
        starts = []
        for job in self.candidates:
            place = places.get(job.job_id)
            if place is not None:
                nodes = [ledger.node(name) for name in place.nodes]
                starts.append(book(job.job_id, self.shapes.of(job), place.gpu_type, nodes, ledger))
        return starts, ledger

    def _with_the_rest(self, starts: Sequence[Start]) -> list[Start]:
        """Adds jobs beyond the window, greedily, into what is left."""
        if len(self.ranked) <= self.settings.window:
            return list(starts)
        types = {gpu.uuid: gpu.gpu_type for node in self.cluster.nodes for gpu in node.gpus}
        booked, ledger = self._book(
            {
                start.job_id: Place(
                    types[start.ranks[0].gpu_uuids[0]] if start.ranks[0].gpu_uuids else "",
                    tuple(rank.node for rank in start.ranks),
                )
                for start in starts
            }
        )
        later = [entry.job for entry in self.ranked[self.settings.window :]]
        return booked + pack(later, ledger, self.shapes)

    def _started(self) -> set[int]:
        return {start.job_id for start in self.starts}

    def _value(self, starts: Sequence[Start]) -> ObjectiveValue:
        return evaluate(starts, self.ranked, self.cluster, self.settings.weights)
