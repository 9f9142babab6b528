"""The codec: what goes out comes back, and what breaks a rule is named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import messages, rltune_pb2
from protos.codec import InvalidMessage, check_job_spec, from_pb, to_pb, valid_job_spec
from protos.messages import (
    ExitFacts,
    GpuProcess,
    GpuSample,
    Hello,
    JobSpec,
    LaunchOrder,
    NodeFacts,
    OomKind,
    RankId,
    RankPhase,
    RankReport,
    StopReason,
)

MIRRORED = [
    cls
    for cls in vars(messages).values()
    if dataclasses.is_dataclass(cls) and hasattr(rltune_pb2, cls.__name__)
]


def spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"name": "j", "user": "u", "argv": ("true",), "cwd": "/", **changes})


@pytest.mark.parametrize("cls", MIRRORED, ids=lambda c: c.__name__)
def test_every_dataclass_has_the_fields_of_its_message(cls: Any) -> None:
    pb_fields = set(getattr(rltune_pb2, cls.__name__).DESCRIPTOR.fields_by_name)
    assert {f.name for f in dataclasses.fields(cls)} == pb_fields


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
odd_bytes = st.binary(max_size=20).map(
    lambda b: b.replace(b"\0", b"").decode(errors="surrogateescape")
)


@given(
    argv=st.lists(odd_bytes, min_size=1, max_size=5).map(tuple),
    env=st.dictionaries(text, odd_bytes, max_size=3),
    limit=st.none() | st.floats(0.1, 1e6),
)
def test_job_spec_comes_back_byte_for_byte(
    argv: tuple[str, ...], env: dict[str, str], limit: float | None
) -> None:
    sent = spec(argv=argv, env=env, time_limit_s=limit, gpu_types=("P100", "T4"))
    wire = to_pb(sent, rltune_pb2.JobSpec).SerializeToString()
    assert from_pb(rltune_pb2.JobSpec.FromString(wire), JobSpec) == sent


def test_absent_is_not_zero_and_empty_is_not_absent() -> None:
    absent = GpuSample(uuid="g")
    empty = GpuSample(uuid="g", processes=(), throttle_reasons=(), gpu_utilization_pct=0.0)
    full = GpuSample(uuid="g", processes=(GpuProcess(7), GpuProcess(8, 0)))
    for sample in (absent, empty, full):
        assert from_pb(to_pb(sample, rltune_pb2.GpuSample), GpuSample) == sample


def test_reports_and_orders_come_back() -> None:
    report = RankReport(
        RankId(3, 2, 1),
        RankPhase.RELEASED,
        pid=12,
        exit=ExitFacts(signal=9, oom=OomKind.HOST, stop_reason=StopReason.MEMORY_LIMIT),
        dirty_gpus={"GPU-1": "left by 12"},
    )
    hello = Hello("n", "id", "boot", "inst", NodeFacts("h", "os", 2, 3), (report,))
    assert from_pb(to_pb(hello, rltune_pb2.Hello), Hello) == hello
    order = LaunchOrder(
        RankId(1, 1), "n", "u", ("a b", ""), {"K": "\n"}, "/", ("GPU-1",), "P100", 1, 0, None, 5.0,
        ("n1",), ("127.0.0.1",), 0,
    )  # fmt: skip
    assert from_pb(to_pb(order, rltune_pb2.LaunchOrder), LaunchOrder) == order


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "two\nlines"}, "spec.name"),
        ({"name": ""}, "spec.name"),
        ({"name": "x" * 256}, "spec.name"),
        ({"user": "a/b"}, "spec.user"),
        ({"argv": ()}, "spec.argv"),
        ({"argv": ("a\0b",)}, "spec.argv[0]"),
        ({"argv": ("a", "x" * 200_000)}, "spec.argv[1]"),
        ({"cwd": "relative"}, "spec.cwd"),
        ({"env": {"A=B": ""}}, "spec.env['A=B']"),
        ({"env": {"BIG": "x" * 200_000}}, "spec.env['BIG']"),
        ({"env": {f"V{i}": "x" * 100_000 for i in range(11)}}, "spec.env"),
        ({"gpus": -1}, "spec.gpus"),
        ({"gpus": 3, "nodes": 2}, "spec.gpus"),
        ({"nodes": 0}, "spec.nodes"),
        ({"cpus": 0}, "spec.cpus"),
        ({"memory_bytes": -5}, "spec.memory_bytes"),
        ({"time_limit_s": -3.0}, "spec.time_limit_s"),
        ({"time_limit_s": 0.0}, "spec.time_limit_s"),
        ({"grace_s": -1.0}, "spec.grace_s"),
        ({"qos": "urgent"}, "spec.qos"),
        ({"gpu_types": ("a b",), "gpus": 1}, "spec.gpu_types[0]"),
        ({"gpu_types": ("P100",)}, "spec.gpu_types"),
        ({"priority": 2**40}, "spec.priority"),
    ],
)
def test_a_broken_rule_is_named_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        check_job_spec(spec(**changes))
    assert caught.value.field == field


def test_numbers_that_are_not_finite_and_unknown_enums_are_refused() -> None:
    message = to_pb(spec(), rltune_pb2.JobSpec)
    message.time_limit_s = math.nan
    with pytest.raises(InvalidMessage, match="spec.time_limit_s"):
        valid_job_spec(message)
    message.ClearField("time_limit_s")
    message.on_node_fail = 99  # type: ignore[assignment]
    with pytest.raises(InvalidMessage, match="spec.on_node_fail"):
        valid_job_spec(message)
