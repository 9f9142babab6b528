"""Ports for the rendezvous of attempts: one an attempt, held until its launch."""

from __future__ import annotations

import socket
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

EPHEMERAL_RANGE_PATH = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_RANGE = range(20_000, 30_000)
"""Below the kernel's default ephemeral range, 32768 to 60999."""
QUARANTINE_S = 120.0
"""Longer than TIME_WAIT (60 s on Linux), so that a new attempt never meets an old one's peers."""


class NoPortError(OSError):
    """Every port of the range is in use or in quarantine."""


def ephemeral_ports() -> range:
    """Ports that the kernel gives to outgoing connections, which may take them at any time."""
    low, high = EPHEMERAL_RANGE_PATH.read_text().split()
    return range(int(low), int(high) + 1)


class HeldPort:
    """A port that nobody else can bind until `release` is called."""

    def __init__(self, port: int, holder: socket.socket) -> None:
        self.port = port
        self._holder = holder

    def release(self) -> None:
        """Frees the port, for the job that was promised it."""
        self._holder.close()


class PortPool:
    """Chooses ports that are free now and were not used lately."""

    def __init__(
        self,
        node_name: str,
        monotonic: Callable[[], float],
        ports: range = DEFAULT_RANGE,
        ephemeral: range | None = None,
    ) -> None:
        """Begins at a place that depends on the name, so that the agents of one machine
        (`rltune up`) do not walk the range in step.
        """
        forbidden = ephemeral_ports() if ephemeral is None else ephemeral
        self._monotonic = monotonic
        self._free = deque(port for port in ports if port not in forbidden)
        self._free.rotate(-(zlib.crc32(node_name.encode()) % len(ports)))
        self._used: deque[tuple[float, int]] = deque()

    def choose(self) -> HeldPort:
        """Binds a free port of the range; raises NoPortError when there is none."""
        now_s = self._monotonic()
        while self._used and now_s - self._used[0][0] >= QUARANTINE_S:
            self._free.append(self._used.popleft()[1])
        for _ in range(len(self._free)):
            port = self._free.popleft()
            holder = _bind(port)
            if holder is not None:
                self._used.append((now_s, port))
                return HeldPort(port, holder)
            self._free.append(port)
        raise NoPortError("every port of the agent's range is in use: widen the range")


def _bind(port: int) -> socket.socket | None:
    """Binds on all addresses of both families, as torch's TCPStore will; None when taken."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if has_both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", port))
    except OSError:
        holder.close()
        return None
    return holder
