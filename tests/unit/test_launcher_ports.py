"""One port an attempt."""

from __future__ import annotations

import socket

import pytest

from node_agent.ports import QUARANTINE_S, NoPortError, PortPool, ephemeral_ports


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def free_ports() -> range:
    """Three neighbouring ports that nobody uses."""
    for low in range(20_000, 30_000, 3):
        ports = range(low, low + 3)
        if all(_is_free(port) for port in ports):
            return ports
    pytest.fail("no three free ports")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def test_ports_differ_and_are_held_until_released(free_ports):
    pool = PortPool("n", Clock(), free_ports, ephemeral=range(0))
    held = [pool.choose() for _ in range(3)]

    assert {h.port for h in held} == set(free_ports)
    assert not any(_is_free(h.port) for h in held)
    held[0].release()
    assert _is_free(held[0].port)
    for h in held[1:]:
        h.release()


def test_used_port_rests_before_it_is_given_again(free_ports):
    clock = Clock()
    pool = PortPool("n", clock, free_ports[:1], ephemeral=range(0))
    pool.choose().release()
    with pytest.raises(NoPortError):
        pool.choose()
    clock.now_s = QUARANTINE_S
    again = pool.choose()
    again.release()

    assert again.port == free_ports[0]


def test_port_that_another_program_uses_is_passed_over(free_ports):
    pool = PortPool("n", Clock(), free_ports, ephemeral=range(0))
    with socket.create_server(("127.0.0.1", free_ports[0])):
        chosen = [pool.choose() for _ in range(2)]
        with pytest.raises(NoPortError):
            pool.choose()
    for held in chosen:
        held.release()

    assert {held.port for held in chosen} == set(free_ports[1:])


def test_ephemeral_ports_are_never_chosen(free_ports):
    pool = PortPool("n", Clock(), free_ports, ephemeral=free_ports[:2])
    held = pool.choose()
    held.release()

    assert held.port == free_ports[2]


def test_agents_of_one_machine_begin_at_different_places():
    first = [PortPool(f"node-{i}", Clock()).choose() for i in range(2)]
    for held in first:
        held.release()

    assert abs(first[0].port - first[1].port) > 1
    assert all(held.port not in ephemeral_ports() for held in first)
