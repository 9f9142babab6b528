"""The Pyomo model of one joint placement, over the flow network of node classes.

    take[a]   integer: nodes that go along arc a, that is, shares placed there
    rest[v]   integer: nodes that end in vertex v, where resting there costs something (it would be
              integer anyway; declared so, GLPK derives Gomory cuts from it: 3 s became 10 ms)
    pick[o]   integer: jobs of a group that go by option o (GPU type and cut), if it has several
    go[j]     binary: optional job j starts

    flow      nodes that start in v + in - out = rest[v] >= 0 (0 in layers before the last)
    demand    shares placed for a demand = shares of the jobs whose options need it
    group     jobs by option = jobs of the group that start
    quota     GPUs of optional jobs under a quota <= what is left of it

Costs are counted from the state in which nobody starts, so that what lies idle elsewhere does not
blur the solver's relative gap.

This module is the only one of the core that loads Pyomo; import it where a model is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo
from pyomo.core.expr import LinearExpression

from controller.scheduler.allocator.milp.classes import AMPLE, Demand, Option
from controller.scheduler.allocator.milp.network import SKIP, Arc, Network, Vertex, usable_options
from controller.scheduler.allocator.objective import ObjectiveWeights
from controller.scheduler.index import NodeState

LEAST_COEFFICIENT = 1e-5
"""Of costs beside the weights of starts: less turns nothing, and solvers take it for noise."""
_Terms = list[tuple[float, Any]]
Quota = tuple[int, Mapping[int, int]]
"""GPUs left, and the GPUs of each optional job that counts."""


@dataclass(frozen=True, slots=True)
class AllocationModel:
    """A Pyomo model with the variables to read back."""

    model: Any
    variables: tuple[Any, ...]
    """`take` in the order of the network's arcs, then `pick` of the options in `picked`, then
    `go` of each optional job."""
    picked: tuple[int, ...]
    """The options that have a variable, by index; others take what their group starts."""


def build_model(
    network: Network,
    start_weights: Mapping[int, float],
    weights: ObjectiveWeights,
    quotas: Sequence[Quota] = (),
) -> AllocationModel:
    """Builds the model in which each job must start, but those in `start_weights` may.

    It maximizes the weights of the optional jobs that start, minus the placement's cost scaled so
    that all of it is worth less than half of the smallest weight; without optional jobs it
    minimizes the cost.
    """
    return _Builder(network, start_weights, weights).build(quotas)


class _Builder:
    def __init__(
        self, network: Network, start_weights: Mapping[int, float], weights: ObjectiveWeights
    ) -> None:
        self.network = network
        self.problem = network.problem
        self.start_weights = start_weights
        self.weights = weights
        self.state_cost = [self._state_cost(vertex) for vertex in network.vertices]
        self.arc_cost = [self._arc_cost(arc) for arc in network.arcs]
        self.options = usable_options(network)
        self.picked = [o for options in self.options if len(options) > 1 for o in options]

    def build(self, quotas: Sequence[Quota]) -> AllocationModel:
        model = pyo.ConcreteModel()
        arcs = self.network.arcs
        model.take = pyo.Var(range(len(arcs)), domain=pyo.NonNegativeIntegers)
        for a, arc in enumerate(arcs):
            model.take[a].setub(arc.most)  # quicker than a rule
        model.pick = pyo.Var(self.picked, domain=pyo.NonNegativeIntegers)
        for o in self.picked:
            group = self.problem.groups[self.problem.options[o].group]
            model.pick[o].setub(len(group.job_ids))
        model.go = pyo.Var(list(self.start_weights), domain=pyo.Binary)
        model.rows = pyo.ConstraintList()
        self._add_flow(model)
        self._add_demand(model)
        for left, gpus in quotas:
            model.rows.add(_linear([(float(g), model.go[job]) for job, g in gpus.items()]) <= left)
        self._set_objective(model)
        variables = (
            *(model.take[a] for a in range(len(arcs))),
            *(model.pick[o] for o in self.picked),
            *(model.go[job_id] for job_id in self.start_weights),
        )
        return AllocationModel(model, variables, tuple(self.picked))

    def _state_cost(self, vertex: Vertex) -> float:
        kind = self.problem.classes[vertex.node_class].kind
        return self.weights.of_state(NodeState(kind, vertex.bin.free, AMPLE, AMPLE))

    def _arc_cost(self, arc: Arc) -> float:
        cost = self.state_cost[arc.head] - self.state_cost[arc.tail]
        if arc.demand == SKIP:
            return cost
        demand: Demand = self.problem.demands[arc.demand]
        if not demand.gpus:
            kind = self.problem.classes[self.network.vertices[arc.tail].node_class].kind
            return cost + self.weights.cpu_job_on_gpu_node * any(kind.capacity)
        if demand.mixed is not None:
            part = demand.gpus / demand.mixed.gpus
            cost += part * self.weights.of_type(demand.mixed, arc.gpu_type)
        return cost

    def _option_cost(self, option: Option) -> float:
        shape = self.problem.groups[option.group].shape
        cost = self.weights.spread * option.extra_nodes if shape.gpus else 0.0
        return cost + self.weights.of_type(shape, option.gpu_type) * bool(option.gpu_type)

    def _add_flow(self, model: Any) -> None:
        vertices = self.network.vertices
        net_out: list[_Terms] = [[] for _ in vertices]
        for a, arc in enumerate(self.network.arcs):
            if arc.tail != arc.head:
                net_out[arc.tail].append((1.0, model.take[a]))
                net_out[arc.head].append((-1.0, model.take[a]))
        costly = [
            v
            for v, vertex in enumerate(vertices)
            if vertex.is_last_layer and self.state_cost[v] and net_out[v]
        ]
        model.rest = pyo.Var(costly, domain=pyo.NonNegativeIntegers)
        for v, vertex in enumerate(vertices):
            if not net_out[v]:
                continue
            supply = float(len(vertex.names))
            if v in model.rest:
                model.rows.add(_linear([*net_out[v], (1.0, model.rest[v])]) == supply)
            elif vertex.is_last_layer:
                model.rows.add(_linear(net_out[v]) <= supply)
            else:
                model.rows.add(_linear(net_out[v]) == supply)

    def _add_demand(self, model: Any) -> None:
        rows: dict[int, tuple[_Terms, float]] = {}
        for a, arc in enumerate(self.network.arcs):
            if arc.demand != SKIP:
                rows.setdefault(arc.demand, ([], 0.0))[0].append((1.0, model.take[a]))
        for g, group in enumerate(self.problem.groups):
            optional = [job for job in group.job_ids if job in self.start_weights]
            must = float(len(group.job_ids) - len(optional))
            go = [(-1.0, model.go[job]) for job in optional]
            for o in self.options[g]:
                jobs = [(-1.0, model.pick[o])] if len(self.options[g]) > 1 else go
                fixed = 0.0 if len(self.options[g]) > 1 else must
                for demand, count in self.problem.options[o].parts:
                    terms, right = rows[demand]
                    terms += [(count * coefficient, variable) for coefficient, variable in jobs]
                    rows[demand] = (terms, right + count * fixed)
            if len(self.options[g]) > 1:
                picks = [(1.0, model.pick[o]) for o in self.options[g]]
                model.rows.add(_linear([*picks, *go]) == must)
        for terms, right in rows.values():
            model.rows.add(_linear(terms) == right)

    def _set_objective(self, model: Any) -> None:
        cost = [
            (value, model.take[a]) for a, value in enumerate(self.arc_cost) if abs(value) > 1e-12
        ]
        for o in self.picked:
            value = self._option_cost(self.problem.options[o])
            if value:
                cost.append((value, model.pick[o]))
        if not self.start_weights:
            model.objective = pyo.Objective(expr=_linear(cost), sense=pyo.minimize)
            return
        gain = [(weight, model.go[job_id]) for job_id, weight in self.start_weights.items()]
        scale = 0.5 * min(self.start_weights.values()) / max(self._largest_swing(), 1e-9)
        loss = [
            (-scale * coefficient, variable)
            for coefficient, variable in cost
            if abs(scale * coefficient) >= LEAST_COEFFICIENT
        ]
        model.objective = pyo.Objective(expr=_linear(gain + loss), sense=pyo.maximize)

    def _largest_swing(self) -> float:
        """The costs of no two placements of these jobs differ by more."""
        swing = 0.0
        per_share = max((abs(value) for value in self.arc_cost), default=0.0)
        for g, group in enumerate(self.problem.groups):
            options = [self.problem.options[o] for o in self.options[g]]
            shares = max((sum(count for _, count in o.parts) for o in options), default=0)
            dearest = max((self._option_cost(option) for option in options), default=0.0)
            swing += len(group.job_ids) * (2.0 * shares * per_share + dearest)
        return swing


def _linear(terms: Sequence[tuple[float, Any]]) -> Any:
    return LinearExpression(
        constant=0.0,
        linear_coefs=[coefficient for coefficient, _ in terms],
        linear_vars=[variable for _, variable in terms],
    )
