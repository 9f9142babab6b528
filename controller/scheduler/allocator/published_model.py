"""The published mixed-integer program for one job, in Pyomo (see `published`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyomo.environ as pyo

from controller.scheduler.allocator.published import ALPHA, BETA, GAMMA
from controller.scheduler.allocator.ways import PoolNode, Way

BIG_M_BEYOND = 10
"""The published big M is the GPUs of a node and this many."""


def build_model(
    ways: Sequence[Way], pool: Sequence[PoolNode], next_gpus: int, *, mended: bool
) -> tuple[Any, list[Any]]:
    """The model over the nodes that occur in some way, as for the published Philly and Alibaba
    maps, and the variables that choose the way.
    """
    touched = {name for way in ways for name, _ in way.gpus}
    nodes = [node for node in pool if node.name in touched]
    model = pyo.ConcreteModel()
    model.pick = pyo.Var(range(len(ways)), domain=pyo.Binary)
    model.partly = pyo.Var(range(len(nodes)), domain=pyo.Binary)
    model.fits_next = pyo.Var(range(len(nodes)), domain=pyo.Binary)
    model.most = pyo.Var(domain=pyo.NonNegativeReals)
    model.least = pyo.Var(domain=pyo.NonNegativeReals)
    model.rows = pyo.ConstraintList()
    model.rows.add(pyo.quicksum(model.pick.values()) == 1)
    if mended:
        model.ends = pyo.Var(range(len(nodes)), ("none free", "all free"), domain=pyo.Binary)
    for n, node in enumerate(nodes):
        taken = {
            w: gpus for w, way in enumerate(ways) for name, gpus in way.gpus if name == node.name
        }
        free = node.free - pyo.quicksum(gpus * model.pick[w] for w, gpus in taken.items())
        model.rows.add(free <= model.most)
        model.rows.add(free >= model.least)
        model.rows.add(free >= next_gpus * model.fits_next[n])
        if mended:
            none, whole = model.ends[n, "none free"], model.ends[n, "all free"]
            model.rows.add(free <= node.capacity * (1 - none))
            model.rows.add(free >= node.capacity * whole)
            model.rows.add(model.partly[n] >= 1 - none - whole)
        else:
            big = node.capacity + BIG_M_BEYOND
            model.rows.add(free >= 1 - big * (1 - model.partly[n]))
            model.rows.add(free <= node.capacity - 1 + big * (1 - model.partly[n]))
    gain = GAMMA * pyo.quicksum(model.fits_next.values()) if next_gpus else 0.0
    model.objective = pyo.Objective(
        expr=ALPHA * pyo.quicksum(model.partly.values()) + BETA * (model.most - model.least) - gain
    )
    return model, list(model.pick.values())
