"""Joint placement of the first jobs of the order: exact, and never worse than greedy.

The objective is `allocator.objective`: starts decide in the order of the queue, then cost. A
weight for each job that dominates all later ones cannot be written in floating point for 128
jobs, so the order is settled in steps:

1. Greedy's answer is the incumbent. Each job that it starts before the first one it skips does
   start in the optimum.
2. A skipped job that would fit alone is in question, unless counting shows that too little is
   left (`bounds.Shortage`) or another heuristic finds room for it. It and the next such jobs,
   `BLOCK` at most, form a block with the weights 2^(BLOCK-1), ..., 2, 1; jobs settled before must
   start. The sum of weights is an integer of at most 2^BLOCK - 1 = 255, so the solver's relative
   gap of 1e-3 leaves less than 0.26 of doubt, and the cost's part (0.5 at most) cannot turn it:
   the block's starts are exact. Its answer, completed by greedy, is the next incumbent.
3. When every job is settled, the cost is minimized with exactly these starts.

The solver is not asked where the answer is known: a job that fits nowhere or for which too little
is left, everything fits at a cost that is provably least, a single job to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from controller.scheduler.allocator.greedy import find_place, finish, pack
from controller.scheduler.allocator.milp.bounds import Shortage, cheapest_place, cost_lower_bound
from controller.scheduler.allocator.milp.classes import make_problem
from controller.scheduler.allocator.milp.expand import UnusableAnswer, expand, to_integers
from controller.scheduler.allocator.milp.network import NetworkTooLarge, build_network
from controller.scheduler.allocator.milp.solvers import MilpSolver, Solution, SolveStatus
from controller.scheduler.allocator.objective import (
    TOLERANCE,
    Evaluator,
    ObjectiveValue,
    ObjectiveWeights,
)
from controller.scheduler.index import index_of
from controller.scheduler.ledger import Ledger, Place
from controller.scheduler.quota import Quotas
from controller.scheduler.shape import JobShape, ShapeIndex, shapes_of
from controller.scheduler.types import ClusterView, Placement, RankedJob

BLOCK = 8
"""Jobs whose starts are settled by one solve (see the module's docstring for the bound)."""
BUILD_S_PER_ARC = 60e-6
"""What building and translating a model takes at most for each arc, on a slow machine."""

SOLVER_SHARE = 0.9
"""Of the time that is left; the rest is for what comes after: places, GPUs, terms."""


def no_clock() -> float:
    """The clock of a decision that has no limit but the model's size."""
    return 0.0


@dataclass(frozen=True, slots=True)
class MilpAllocator:
    """Places the first `window` jobs jointly; later ones greedily into what is left."""

    solver: MilpSolver | None
    no_solver: str = "no MILP solver is set up"
    """Why there is none, for `Placement.fallback`."""
    window: int = 128
    time_limit_s: float = 0.2
    """For one decision as a whole."""
    weights: ObjectiveWeights = field(default_factory=ObjectiveWeights)
    monotonic: Callable[[], float] = no_clock
    """Seconds from any fixed moment, to hold the limit. Without one only the solver holds it."""
    name: str = "milp"

    def place(self, ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float) -> Placement:
        """The best joint placement found within the limit."""
        return _Search(self, ranked, cluster, now_s).run()


class _Stopped(Exception):
    """The solver gave no answer; the reason is noted in the search."""


class _Search:
    """One decision: the incumbent, what is settled, what the solver may still spend."""

    def __init__(
        self,
        settings: MilpAllocator,
        ranked: Sequence[RankedJob],
        cluster: ClusterView,
        now_s: float,
    ) -> None:
        self.began_s = settings.monotonic()
        self.settings = settings
        self.ranked = ranked
        self.cluster = cluster
        self.index = index_of(cluster)
        self.shapes = shapes_of(ranked, cluster, ShapeIndex(self.index), now_s)
        self.quotas = Quotas(cluster)
        """As they are before any start; never booked."""
        self.free = Ledger(self.index, cluster.rooms)
        """As the cluster is before any start; never booked."""
        self.evaluator = Evaluator(ranked, self.shapes, self.index, settings.weights)
        self.candidates = self._that_fit_alone(ranked[: settings.window])
        self.places = pack(self.candidates, self.shapes, self.free.copy(), self.quotas.copy())
        """The incumbent."""
        self._known_value: tuple[Mapping[int, Place], ObjectiveValue] | None = None
        self.solved_s = 0.0
        self.cut_short = False
        self.fallback = ""

    def run(self) -> Placement:
        greedy = self._with_the_rest(self.places)
        with suppress(_Stopped):  # then the incumbent stands; cut_short or fallback says why
            self._reduce_cost(self._settle_starts())
        best = self._with_the_rest(self.places)
        value = self._value(best)
        if self.cut_short or self.fallback or len(self.ranked) > self.settings.window:
            greedy_value = self._value(greedy)
            if greedy_value.is_better_than(value):
                best, value = greedy, greedy_value
        placement = finish(best, self.index, self.evaluator, value)
        return replace(
            placement, cut_short=self.cut_short, fallback=self.fallback, solve_s=self.solved_s
        )

    def _that_fit_alone(self, jobs: Sequence[RankedJob]) -> list[RankedJob]:
        fits: dict[JobShape, bool] = {}
        for entry in jobs:
            shape = self._shape(entry)
            if shape not in fits:
                fits[shape] = find_place(self.free, shape) is not None
        return [entry for entry in jobs if fits[self._shape(entry)]]

    def _shape(self, entry: RankedJob) -> JobShape:
        return self.shapes[entry.job.job_id]

    def _settle_starts(self) -> list[RankedJob]:
        """Finds which candidates start in the optimum; the incumbent then starts exactly them."""
        settled: list[RankedJob] = []
        rejected: list[JobShape] = []
        shortage = Shortage(self.free, [self._shape(entry) for entry in self.candidates])
        quotas = self.quotas.copy()
        position = 0

        def settle(entry: RankedJob) -> None:
            settled.append(entry)
            shortage.start(self._shape(entry))
            quotas.take(entry.job.spec)

        while position < len(self.candidates):
            entry = self.candidates[position]
            if entry.job.job_id in self.places:
                settle(entry)
                position += 1
                continue
            if not quotas.allows(entry.job.spec) or self._is_out(entry, shortage, rejected):
                position += 1
                continue
            if self._repack(settled, entry, self.candidates[position + 1 :]):
                continue
            block, position = self._next_block(position, shortage, rejected)
            going = self._solve_block(settled, block, quotas, self.candidates[position:])
            for entry in block:
                if entry.job.job_id in going:
                    settle(entry)
                elif quotas.allows(entry.job.spec):
                    rejected.append(self._shape(entry))
        return settled

    def _is_out(self, entry: RankedJob, shortage: Shortage, rejected: Sequence[JobShape]) -> bool:
        shape = self._shape(entry)
        return shortage.forbids(shape) or any(shape.is_at_least(other) for other in rejected)

    def _next_block(
        self, position: int, shortage: Shortage, rejected: Sequence[JobShape]
    ) -> tuple[list[RankedJob], int]:
        """The next jobs in question, and the position after the last job that was looked at."""
        block: list[RankedJob] = []
        while position < len(self.candidates) and len(block) < BLOCK:
            entry = self.candidates[position]
            position += 1
            if not self._is_out(entry, shortage, rejected):
                block.append(entry)
        return block, position

    def _repack(
        self, settled: Sequence[RankedJob], entry: RankedJob, later: Sequence[RankedJob]
    ) -> bool:
        """Tries to make room for a job in question: large and choosy jobs are packed first."""
        wanted = [*settled, entry]
        for order in (self._choosy_first, self._large_first):
            ledger, quotas = self.free.copy(), self.quotas.copy()
            places = pack(sorted(wanted, key=order), self.shapes, ledger, quotas)
            if len(places) == len(wanted):
                self.places = places | pack(later, self.shapes, ledger, quotas)
                return True
        return False

    def _choosy_first(self, entry: RankedJob) -> tuple[int, int]:
        shape = self._shape(entry)
        return len(shape.types), -shape.gpus

    def _large_first(self, entry: RankedJob) -> tuple[int, int]:
        shape = self._shape(entry)
        return -shape.gpus, len(shape.types)

    def _solve_block(
        self,
        settled: Sequence[RankedJob],
        block: Sequence[RankedJob],
        quotas: Quotas,
        later: Sequence[RankedJob],
    ) -> set[int]:
        """Settles a block: which of its jobs start. Makes the incumbent agree with that."""
        weights = {entry.job.job_id: 2.0 ** (BLOCK - 1 - i) for i, entry in enumerate(block)}
        places, is_proven = self._solve([*settled, *block], weights, _quota_rows(block, quotas))
        going = {entry.job.job_id for entry in block if entry.job.job_id in places}
        kept = {entry.job.job_id for entry in block if entry.job.job_id in self.places}
        if going != kept:
            ledger, left = self._booked(places)
            found = places | pack(later, self.shapes, ledger, left)
            if self._value(found).is_better_than(self._value(self.places)):
                self.places = found
        if not is_proven:
            raise _Stopped
        return going

    def _reduce_cost(self, settled: Sequence[RankedJob]) -> None:
        """Finds the cheapest placement that starts exactly the settled jobs."""
        if not settled:
            return
        shapes = [self._shape(entry) for entry in settled]
        if len(settled) == 1:
            weights = self.settings.weights
            cheapest = cheapest_place(self.free, shapes[0], weights, self.evaluator)
            if cheapest is not None:
                self._take_if_better({settled[0].job.job_id: cheapest})
                return
        least = cost_lower_bound(self.free, shapes, self.settings.weights)
        if least is not None and self._value(self.places).cost <= least + TOLERANCE:
            return
        places, _ = self._solve(settled, {}, ())
        self._take_if_better(places)

    def _solve(
        self,
        jobs: Sequence[RankedJob],
        start_weights: Mapping[int, float],
        quotas: Sequence[tuple[int, Mapping[int, int]]],
    ) -> tuple[dict[int, Place], bool]:
        """Places for the jobs that start, and whether that is proven to be the optimum.

        Raises:
            _Stopped: there is no answer.
        """
        ids = [entry.job.job_id for entry in jobs]
        try:
            network = build_network(make_problem(ids, self.shapes, self.free))
        except NetworkTooLarge:
            self.cut_short = True
            raise _Stopped from None
        if self.settings.solver is None:
            self.fallback = self.settings.no_solver
            raise _Stopped
        if self._left_s() <= BUILD_S_PER_ARC * len(network.arcs):
            self.cut_short = True
            raise _Stopped
        from controller.scheduler.allocator.milp.model import (  # noqa: PLC0415 (loads Pyomo)
            build_model,
        )

        model = build_model(network, start_weights, self.settings.weights, quotas)
        solution = self._run_solver(self.settings.solver, model.model, model.variables)
        try:
            values = to_integers(solution.values)
            flows, rest = values[: len(network.arcs)], values[len(network.arcs) :]
            picks = dict(zip(model.picked, rest, strict=False))
            going = zip(start_weights, rest[len(model.picked) :], strict=True)
            starting = set(ids) - {job_id for job_id, go in going if not go}
            places = expand(network, flows, picks, starting)
        except UnusableAnswer as error:
            self.fallback = f"the solver's answer cannot be used: {error}"
            raise _Stopped from error
        return places, solution.status is SolveStatus.OPTIMAL

    def _run_solver(
        self, solver: MilpSolver, model: object, variables: Sequence[object]
    ) -> Solution:
        solution = solver.solve(model, variables, max(0.0, SOLVER_SHARE * self._left_s()))
        self.solved_s += solution.elapsed_s
        self.cut_short |= solution.status in {SolveStatus.FEASIBLE, SolveStatus.LIMIT}
        if solution.status is SolveStatus.ERROR:
            self.fallback = solution.message
        if solution.status is SolveStatus.INFEASIBLE:
            self.fallback = "the solver found a model infeasible that has a solution"
        if not solution.has_values:
            raise _Stopped
        return solution

    def _left_s(self) -> float:
        passed_s = self.settings.monotonic() - self.began_s
        return self.settings.time_limit_s - max(passed_s, self.solved_s)

    def _take_if_better(self, places: Mapping[int, Place]) -> None:
        incumbent = self._value(self.places)
        if self._value(places).is_better_than(incumbent):
            order = [entry.job.job_id for entry in self.candidates]
            self.places = {job_id: places[job_id] for job_id in order if job_id in places}

    def _value(self, places: Mapping[int, Place]) -> ObjectiveValue:
        """The value of places; the last one asked for is remembered."""
        if self._known_value is None or self._known_value[0] != places:
            self._known_value = (dict(places), self.evaluator.value(places))
        return self._known_value[1]

    def _booked(self, places: Mapping[int, Place]) -> tuple[Ledger, Quotas]:
        ledger, quotas = self.free.copy(), self.quotas.copy()
        for entry in self.ranked:
            place = places.get(entry.job.job_id)
            if place is not None:
                ledger.take(self._shape(entry), place)
                quotas.take(entry.job.spec)
        return ledger, quotas

    def _with_the_rest(self, places: Mapping[int, Place]) -> dict[int, Place]:
        """In the order of the queue, with jobs beyond the window packed into what is left."""
        found = dict(places)
        later = self.ranked[self.settings.window :]
        if later:
            found |= pack(later, self.shapes, *self._booked(places))
        ids = (entry.job.job_id for entry in chain(self.ranked))
        return {job_id: found[job_id] for job_id in ids if job_id in found}


def _quota_rows(block: Sequence[RankedJob], quotas: Quotas) -> list[tuple[int, Mapping[int, int]]]:
    rows: dict[tuple[str, str], tuple[int, dict[int, int]]] = {}
    for entry in block:
        for key, left in quotas.binding(entry.job.spec).items():
            rows.setdefault(key, (left, {}))[1][entry.job.job_id] = entry.job.spec.gpus
    return list(rows.values())
