"""The Pyomo model of one joint placement, over the flow network of node classes.

    take[a]   integer: nodes that go along arc a, that is, ranks placed there
    rest[v]   integer: nodes that end in vertex v, where resting there costs something (it would be
              integer anyway; declared so, GLPK derives Gomory cuts from it: 3 s became 10 ms)
    go[j]     binary: optional job j starts
    on[g,t]   binary: the job over several nodes of group g takes GPUs of type t

    flow      nodes that start in v + in - out = rest[v] >= 0 (0 in layers before the last)
    demand    ranks of a group = jobs of it that start (times nodes and one type, for gangs)

This module is the only one of the core that loads Pyomo; import it where a model is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo
from pyomo.core.expr import LinearExpression

from controller.scheduler.allocator.milp.network import SKIP, Arc, Network
from controller.scheduler.allocator.objective import ObjectiveWeights
from controller.scheduler.ledger import preference_of

_Terms = list[tuple[float, Any]]


@dataclass(frozen=True, slots=True)
class AllocationModel:
    """A Pyomo model with the variables to read back."""

    model: Any
    variables: tuple[Any, ...]
    """Flow of each arc of the network in its order, then `go` of each optional job."""


def build_model(
    network: Network, start_weights: Mapping[int, float], weights: ObjectiveWeights
) -> AllocationModel:
    """Builds the model in which each job must start, but those in `start_weights` may.

    It maximizes the weights of the optional jobs that start, minus the placement's cost scaled so
    that all of it is worth less than half of the smallest weight; without optional jobs it
    minimizes the cost.
    """
    model = pyo.ConcreteModel()
    model.take = pyo.Var(
        range(len(network.arcs)),
        domain=pyo.NonNegativeIntegers,
        bounds=lambda _, a: (0, network.arcs[a].most),
    )
    model.go = pyo.Var(list(start_weights), domain=pyo.Binary)
    model.rows = pyo.ConstraintList()
    cost = _arc_costs(network, model, weights) + _add_flow(network, model, weights)
    cost += _add_demand(network, model, set(start_weights), weights)
    _set_objective(model, start_weights, cost, _worst_cost(network, weights))
    take = [model.take[a] for a in range(len(network.arcs))]
    return AllocationModel(model, (*take, *(model.go[job_id] for job_id in start_weights)))


def _arc_costs(network: Network, model: Any, weights: ObjectiveWeights) -> _Terms:
    terms: _Terms = []
    for a, arc in enumerate(network.arcs):
        cost = _rank_cost(network, arc, weights)
        if cost:
            terms.append((cost, model.take[a]))
    return terms


def _rank_cost(network: Network, arc: Arc, weights: ObjectiveWeights) -> float:
    """What one rank costs on this arc; a gang's type is charged once, in `_add_demand`."""
    if arc.group == SKIP:
        return 0.0
    shape = network.groups[arc.group].shape
    if shape.gpus == 0:
        has_gpus = any(network.classes[network.vertices[arc.tail].node_class].capacity)
        return weights.cpu_job_on_gpu_node * has_gpus
    if shape.nodes > 1:
        return 0.0
    return weights.type_preference * preference_of(shape, arc.gpu_type)


def _add_flow(network: Network, model: Any, weights: ObjectiveWeights) -> _Terms:
    net_out: list[_Terms] = [[] for _ in network.vertices]
    for a, arc in enumerate(network.arcs):
        if arc.tail != arc.head:
            net_out[arc.tail].append((1.0, model.take[a]))
            net_out[arc.head].append((-1.0, model.take[a]))
    costly = [
        v
        for v, vertex in enumerate(network.vertices)
        if vertex.is_last_layer and vertex.partly_used_pools and net_out[v]
    ]
    model.rest = pyo.Var(costly, domain=pyo.NonNegativeIntegers)
    for v, vertex in enumerate(network.vertices):
        if not net_out[v]:
            continue
        supply = float(len(vertex.names))
        if v in model.rest:
            model.rows.add(_linear([*net_out[v], (1.0, model.rest[v])]) == supply)
        elif vertex.is_last_layer:
            model.rows.add(_linear(net_out[v]) <= supply)
        else:
            model.rows.add(_linear(net_out[v]) == supply)
    return [
        (weights.fragmentation * network.vertices[v].partly_used_pools, model.rest[v])
        for v in costly
    ]


def _add_demand(
    network: Network, model: Any, optional: set[int], weights: ObjectiveWeights
) -> _Terms:
    supply: dict[tuple[int, str], _Terms] = {}
    for a, arc in enumerate(network.arcs):
        if arc.group != SKIP:
            supply.setdefault((arc.group, arc.gpu_type), []).append((1.0, model.take[a]))
    gangs = [key for key in supply if network.groups[key[0]].shape.nodes > 1]
    model.on = pyo.Var(gangs, domain=pyo.Binary)
    for key in gangs:
        nodes = network.groups[key[0]].shape.nodes
        model.rows.add(_linear([*supply[key], (-float(nodes), model.on[key])]) == 0)
    for g, group in enumerate(network.groups):
        placed: _Terms = []
        for key, terms in supply.items():
            if key[0] == g:
                placed += [(1.0, model.on[key])] if group.shape.nodes > 1 else terms
        asked = [(-1.0, model.go[job_id]) for job_id in group.job_ids if job_id in optional]
        model.rows.add(_linear([*placed, *asked]) == float(len(group.job_ids) - len(asked)))
    return [
        (weights.type_preference * preference, model.on[group, gpu_type])
        for group, gpu_type in gangs
        if (preference := preference_of(network.groups[group].shape, gpu_type))
    ]


def _worst_cost(network: Network, weights: ObjectiveWeights) -> float:
    """No placement of these jobs costs more."""
    pools = sum(len(node_class.gpu_types) * node_class.size for node_class in network.classes)
    jobs = sum(
        len(group.job_ids)
        * max(
            weights.cpu_job_on_gpu_node * group.shape.nodes,
            weights.type_preference
            * max((choice.preference for choice in group.shape.types), default=0),
        )
        for group in network.groups
    )
    return weights.fragmentation * pools + jobs


def _set_objective(
    model: Any, start_weights: Mapping[int, float], cost: _Terms, worst_cost: float
) -> None:
    if not start_weights:
        model.objective = pyo.Objective(expr=_linear(cost), sense=pyo.minimize)
        return
    gain = [(weight, model.go[job_id]) for job_id, weight in start_weights.items()]
    scale = 0.5 * min(start_weights.values()) / worst_cost if cost else 0.0
    loss = [(-scale * coefficient, variable) for coefficient, variable in cost]
    model.objective = pyo.Objective(expr=_linear(gain + loss), sense=pyo.maximize)


def _linear(terms: Sequence[tuple[float, Any]]) -> Any:
    return LinearExpression(
        constant=0.0,
        linear_coefs=[coefficient for coefficient, _ in terms],
        linear_vars=[variable for _, variable in terms],
    )
