"""How the parts of a local cluster are started: their names and command lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.values import parse_gpus

CONTROLLER = "controller"
WATCHDOG = "watchdog"
CPUS_PER_MOCK_GPU = 4
"""What the RLTune testbed's jobs ask for with each GPU."""


@dataclass(frozen=True, slots=True)
class CommandLines:
    """What the parts of one cluster are told."""

    gpus: tuple[str | None, ...]
    """Of each node; None: this machine's real ones."""
    policy: str
    allocator: str
    cluster: str
    mock_faults: Mapping[str, Path]
    """By node."""
    controller_options: tuple[str, ...] = ()
    """Further ones, as `rltune controller` takes them."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes in order."""
        return tuple(f"node-{number}" for number in range(1, len(self.gpus) + 1))

    def watchdog(self, scratch: Path) -> list[str]:
        """For the process that ends the cluster if we die."""
        return [sys.executable, "-P", "-m", "testbed.watchdog", str(scratch)]

    def controller(self, port: int, state_dir: Path) -> list[str]:
        """For the controller, on loopback."""
        return [
            *(sys.executable, "-P", "-m", "controller"),
            *("--listen", f"127.0.0.1:{port}"),
            *("--state-dir", str(state_dir / CONTROLLER)),
            *("--policy", self.policy),
            *("--allocator", self.allocator),
            *("--cluster", self.cluster),
            *self.controller_options,
        ]

    def agent(self, node: str, address: str, state_dir: Path) -> list[str]:
        """For a node's agent; `address` is the controller's."""
        argv = [
            *(sys.executable, "-P", "-m", "node_agent"),
            *("--controller", address),
            *("--name", node),
            *("--state-dir", str(state_dir / node)),
        ]
        gpus = self.gpus[self.node_names.index(node)]
        if gpus is not None:
            argv += ["--mock-gpus", gpus, "--cpus", str(_mock_cpus(gpus))]
        if node in self.mock_faults:
            argv += ["--mock-faults", str(self.mock_faults[node])]
        return argv


def _mock_cpus(gpus: str) -> int:
    """CPU cores that a mock node offers: enough for jobs that ask for four with each GPU.

    They are declared, not there: the cluster's jobs share this machine's cores.
    """
    count = sum(parse_gpus(part).count for part in gpus.split(","))
    return max(os.cpu_count() or 1, CPUS_PER_MOCK_GPU * count)
