"""How close a node's GPUs are to each other, as a path for each: NUMA node, switch, NVLink island.

NVML tells the closest thing that two cards have in common. Cards that share something of one
kind form a group; a card's path names its group of each kind by the lowest index in it, from the
kind that splits the node least to the one that splits it most. Cards that share a longer beginning
of their paths are closer. On machines with an NVSwitch all cards are one NVLink island, which then
comes first and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from node_agent.nvml_api import FaultKind, NvmlApi, NvmlFault
from node_agent.nvml_card import Card

_ANCESTORS = {
    "NVML_TOPOLOGY_NODE": 40,
    "NVML_TOPOLOGY_HOSTBRIDGE": 30,
    "NVML_TOPOLOGY_MULTIPLE": 20,
    "NVML_TOPOLOGY_SINGLE": 10,
}
"""Kinds of common ancestors, from far to near, with their values in NVML's header: one NUMA node,
one host bridge, several PCIe switches, one PCIe switch."""
_NVLINK_INDEX = 2
"""NVML_P2P_CAPS_INDEX_NVLINK."""

Path = tuple[int, ...]


def read_topology(api: NvmlApi, cards: Sequence[Card]) -> Mapping[str, Path]:
    """The path of each card by UUID; empty where NVML does not tell.

    Raises:
        NvmlFault: NVML as a whole is out of reach.
    """
    reachable = [card for card in cards if card.handle is not None]
    if len(reachable) < 2:
        return {}
    ancestors: dict[tuple[int, int], int] = {}
    linked: set[tuple[int, int]] = set()
    try:
        for one, other in combinations(range(len(reachable)), 2):
            handles = (reachable[one].handle, reachable[other].handle)
            ancestors[one, other] = int(api.call("nvmlDeviceGetTopologyCommonAncestor", *handles))
            if _has_nvlink(api, *handles):
                linked.add((one, other))
    except NvmlFault as fault:
        if fault.kind in (FaultKind.DRIVER_MISMATCH, FaultKind.UNINITIALIZED):
            raise
        return {}
    levels = [
        _groups(len(reachable), [pair for pair, level in ancestors.items() if level <= limit])
        for limit in _ANCESTORS.values()
    ]
    if linked:
        levels.append(_groups(len(reachable), linked))
    levels.sort(key=lambda groups: len(set(groups)))
    telling = [
        groups
        for n, groups in enumerate(levels)
        if len(set(groups)) < len(reachable) and (n == 0 or groups != levels[n - 1])
    ]
    return {
        card.uuid: tuple(reachable[groups[n]].index for groups in telling)
        for n, card in enumerate(reachable)
    }


def _has_nvlink(api: NvmlApi, one: object, other: object) -> bool:
    """Whether two cards are linked; cards that know nothing of NVLink are not."""
    try:
        status = int(api.call("nvmlDeviceGetP2PStatus", one, other, _NVLINK_INDEX))
    except NvmlFault as fault:
        if fault.kind is FaultKind.NOT_SUPPORTED:
            return False
        raise
    return status == 0  # NVML_P2P_STATUS_OK


def _groups(count: int, pairs: Sequence[tuple[int, int]] | set[tuple[int, int]]) -> list[int]:
    """The lowest member of each one's group, where the pairs belong together."""
    lowest = list(range(count))
    for one, other in sorted(pairs):
        first, second = sorted((lowest[one], lowest[other]))
        lowest = [first if group == second else group for group in lowest]
    return lowest
