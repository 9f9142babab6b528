"""Effects to orders: one outgoing queue per node, drained by the gateway.

Nobody ever waits for a node here. Orders for a node whose agent is not connected are not kept:
when it connects, what is still to be done follows from the state (see `lifecycle.node_rules`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import assert_never

from controller.lifecycle.effects import Effect, Launch, Stop
from controller.lifecycle.state import StateView
from protos.messages import LaunchOrder, RankId, StopOrder

Order = LaunchOrder | StopOrder
OrderQueue = asyncio.Queue[Order]


class Dispatch:
    """Holds what connected agents are told."""

    def __init__(self, cluster: str = "rltune") -> None:
        """`cluster` is the name that jobs see."""
        self._cluster = cluster
        self._queues: dict[str, OrderQueue] = {}

    def connect(self, node: str) -> None:
        """A new session of a node: it starts with an empty queue, an older one's is dropped."""
        self._queues[node] = asyncio.Queue()

    def disconnect(self, node: str) -> None:
        """The node's session is over."""
        self._queues.pop(node, None)

    def queue(self, node: str) -> OrderQueue:
        """The queue of the node's present session."""
        return self._queues[node]

    def perform(self, effects: Iterable[Effect], state: StateView) -> None:
        """Queues the orders of effects whose changes are stored."""
        for effect in effects:
            queue = self._queues.get(effect.node)
            if queue is None:
                continue
            match effect:
                case Launch():
                    queue.put_nowait(self._launch_order(effect.rank, state))
                case Stop():
                    queue.put_nowait(StopOrder(effect.rank, effect.reason, effect.grace_s))
                case _:
                    assert_never(effect)

    def _launch_order(self, rank_id: RankId, state: StateView) -> LaunchOrder:
        job = state.job(rank_id.job_id)
        attempt = state.attempt((rank_id.job_id, rank_id.attempt))
        assert job is not None
        assert attempt is not None
        spec = job.spec
        rank = attempt.ranks[rank_id.node_rank]
        nodes = [state.node(r.node) for r in attempt.ranks]
        types = {
            gpu.gpu_type
            for node in nodes
            if node is not None
            for gpu in node.facts.gpus
            if gpu.uuid in rank.gpu_uuids
        }
        return LaunchOrder(
            rank=rank_id,
            name=spec.name,
            user=spec.user,
            argv=spec.argv,
            env=spec.env,
            cwd=spec.cwd,
            gpu_uuids=rank.gpu_uuids,
            gpu_type=min(types, default=""),
            cpus=spec.cpus,
            memory_bytes=spec.memory_bytes,
            time_limit_s=spec.time_limit_s,
            grace_s=spec.grace_s,
            node_names=tuple(r.node for r in attempt.ranks),
            node_addresses=tuple("" if node is None else node.address for node in nodes),
            master_port=attempt.master_port,
            cluster=self._cluster,
            gpus_by_node=tuple(len(r.gpu_uuids) for r in attempt.ranks),
        )
