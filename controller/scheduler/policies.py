"""The policies and allocators that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable

from controller.scheduler.allocator.greedy import GreedyAllocator
from controller.scheduler.allocator.milp.milp import MilpAllocator, no_clock
from controller.scheduler.allocator.milp.solvers import MilpSolver
from controller.scheduler.allocator.objective import PRESETS
from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.allocator.published import rltune
from controller.scheduler.prioritizer.formulas import FORMULAS, Formula
from controller.scheduler.prioritizer.heuristics import Fcfs, ShortestJobFirst, SmallestFirst
from controller.scheduler.prioritizer.multifactor import Multifactor, MultifactorWeights
from controller.scheduler.prioritizer.protocol import Prioritizer

PRIORITIZERS = ("fcfs", "multifactor", "sjf", "smallest", *sorted(FORMULAS))
ALLOCATORS = ("greedy", "milp", "rltune", "rltune-mended", "rltune-tier1", "worst-fit")
NEED_SOLVER = frozenset({"milp", "rltune", "rltune-mended"})
AIMS = tuple(sorted(PRESETS))
DEFAULT_AIM = "completion-time"
DEFAULT_TIME_LIMIT_S = 0.2
DEFAULT_JOINT_JOBS = 128


def make_prioritizer(name: str, *, weights: MultifactorWeights | None = None) -> Prioritizer:
    """The policy of that name; `weights` are for `multifactor` (None: its defaults).

    Raises:
        ValueError: no such policy; the message names those that exist.
    """
    match name:
        case "fcfs":
            return Fcfs()
        case "sjf":
            return ShortestJobFirst()
        case "smallest":
            return SmallestFirst()
        case "multifactor":
            return Multifactor(weights or MultifactorWeights())
    if name in FORMULAS:
        return Formula(name)
    raise ValueError(f"no policy is named {name!r}; there are {', '.join(PRIORITIZERS)}")


def make_allocator(
    name: str,
    *,
    solver: MilpSolver | None = None,
    no_solver: str = "no MILP solver is set up",
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    joint_jobs: int = DEFAULT_JOINT_JOBS,
    aim: str = DEFAULT_AIM,
    monotonic: Callable[[], float] = no_clock,
) -> Allocator:
    """The allocator of that name.

    Args:
        name: one of `ALLOCATORS`.
        solver: for `milp` (without one its decisions fall back to greedy's where a solver is due)
            and `rltune` (falls back to the first way).
        no_solver: why there is none, told in `Placement.fallback`.
        time_limit_s: for `milp`: one decision as a whole.
        joint_jobs: for `milp`: how many jobs of the order are placed jointly.
        aim: one of `AIMS`: which of the places at which jobs could start is best.
        monotonic: for `milp`: a clock in seconds to hold the limit; without one only the solver
            holds it, and decisions do not depend on how fast the machine is.

    Raises:
        ValueError: no such allocator or aim; the message names those that exist.
    """
    if aim not in PRESETS:
        raise ValueError(f"no aim is named {aim!r}; there are {', '.join(AIMS)}")
    match name:
        case "greedy":
            return GreedyAllocator(PRESETS[aim])
        case "worst-fit":
            return GreedyAllocator(PRESETS[aim], packs=False, name=name)
        case "rltune" | "rltune-mended" | "rltune-tier1":
            return rltune(solver, name)
        case "milp":
            return MilpAllocator(
                solver,
                no_solver,
                window=joint_jobs,
                time_limit_s=time_limit_s,
                weights=PRESETS[aim],
                monotonic=monotonic,
            )
    raise ValueError(f"no allocator is named {name!r}; there are {', '.join(ALLOCATORS)}")
