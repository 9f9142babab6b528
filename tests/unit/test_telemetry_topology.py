"""Paths of GPUs in a node's topology, and which GPUs a share then gets."""

from types import SimpleNamespace

import pytest

from controller.scheduler.slots import choose_slots
from controller.scheduler.types import GpuSlot
from node_agent.gpu_profiles import parse_mock_gpus
from node_agent.mock_nvml import MockNvml
from node_agent.nvml import NvmlCollector
from node_agent.nvml_api import NvmlApi
from node_agent.nvml_card import Card
from node_agent.nvml_topology import read_topology


def mock_paths(gpus):
    nvml = MockNvml(parse_mock_gpus(gpus), "seed", monotonic=lambda: 0.0, sleep=lambda _s: None)
    return [facts.near for facts in NvmlCollector(nvml, mock=True).scan().facts]


def test_mock_nodes_have_sockets_switches_and_links():
    assert mock_paths("P100:8") == [
        (0, 0), (0, 0), (0, 2), (0, 2), (4, 4), (4, 4), (4, 6), (4, 6),
    ]  # fmt: skip
    assert mock_paths("P100") == [()]
    assert mock_paths("V100-16GB:2") == [(0,), (0,)]


def machine(ancestor, linked):
    nvml = SimpleNamespace(
        NVMLError=ValueError,
        nvmlDeviceGetTopologyCommonAncestor=ancestor,
        nvmlDeviceGetP2PStatus=lambda a, b, _index: 0 if linked(a, b) else 1,
    )
    cards = [Card(uuid=f"g{i}", index=i, handle=i) for i in range(8)]
    paths = read_topology(NvmlApi(nvml), cards)
    return [paths[f"g{i}"] for i in range(8)]


def test_an_island_of_all_cards_says_nothing():
    paths = machine(lambda a, b: 30 if a // 4 == b // 4 else 50, lambda _a, _b: True)
    assert paths[0] == (0, 0)
    assert paths[7] == (0, 4)


def test_links_finer_than_switches_come_last():
    paths = machine(lambda a, b: 20 if a // 4 == b // 4 else 50, lambda a, b: a // 2 == b // 2)
    assert paths[3] == (0, 2)
    assert paths[5] == (4, 4)


PATHS = [(0, 0), (0, 0), (0, 2), (0, 2), (4, 4), (4, 4), (4, 6), (4, 6)]


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        (range(8), 2, [0, 1]),
        ([1, 2, 3, 4], 2, [2, 3]),
        ([0, 2, 3, 4, 5, 6], 2, [2, 3]),
        ([0, 1, 2, 3, 4, 5], 2, [4, 5]),
        ([0, 1, 2, 3, 5, 6], 4, [0, 1, 2, 3]),
        ([1, 3, 4, 6, 7], 3, [4, 6, 7]),
        ([1, 3, 4, 7], 3, [1, 3, 4]),
        (range(8), 8, list(range(8))),
        ([3], 1, [3]),
    ],
)
def test_a_share_gets_gpus_that_are_close(free, count, expected):
    slots = [GpuSlot(f"g{i}", i, "P100", True, near=PATHS[i]) for i in free]
    assert [slot.index for slot in choose_slots(slots, count)] == expected
