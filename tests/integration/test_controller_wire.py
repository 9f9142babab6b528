"""The controller's wire, called without our client: health, reflection, status codes, sessions."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from protos import rltune_pb2 as pb
from protos import rltune_pb2_grpc as pb_grpc
from protos.messages import PROTOCOL_MAJOR


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    state = tmp_path_factory.mktemp("controller")
    command = [sys.executable, "-P", "-m", "controller"]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", "--state-dir", str(state), "--lease", "3"],
            stderr=log,
        )
    try:
        _until((state / "controller.json").exists, process, state / "log")
        address = json.loads((state / "controller.json").read_text())["address"]
        with grpc.insecure_channel(address) as opened:
            yield opened
    finally:
        process.terminate()
        assert process.wait(10) == 0


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(400):
        if condition():
            return
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    pytest.fail(f"the controller did not start: {log.read_text()}")


def job(**changes: Any) -> pb.JobSpec:
    fields = {
        "name": "j",
        "user": "u",
        "argv": [b"true"],
        "cwd": b"/",
        "nodes": 1,
        "cpus": 1,
        "qos": "normal",
        "on_node_fail": pb.ON_NODE_FAIL_REQUEUE,
        **changes,
    }
    return pb.JobSpec(**fields)  # type: ignore[arg-type]


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "rltune.v1.Controller", "rltune.v1.AgentGateway"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"rltune.v1.Controller", "rltune.v1.AgentGateway"} <= services


@pytest.mark.parametrize(
    ("request_id", "spec", "field"),
    [
        ("", job(), "request_id"),
        ("x" * 500, job(), "request_id"),
        ("a", pb.JobSpec(), "spec.on_node_fail"),
        ("b", job(name="a\nb"), "spec.name"),
        ("c", job(argv=[]), "spec.argv"),
        ("d", job(gpus=-2), "spec.gpus"),
        ("e", job(nodes=0), "spec.nodes"),
        ("f", job(time_limit_s=float("inf")), "spec.time_limit_s"),
        ("g", job(user="../root"), "spec.user"),
        ("h", job(cwd=b"here"), "spec.cwd"),
    ],
)
def test_a_bad_submission_names_the_field(
    channel: grpc.Channel, request_id: str, spec: pb.JobSpec, field: str
) -> None:
    stub = pb_grpc.ControllerStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.SubmitJob(pb.SubmitJobRequest(request_id=request_id, spec=spec), timeout=5)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    detail = json.loads(dict(error.trailing_metadata())["rltune-error-bin"])
    assert detail["field"] == field
    assert field in detail["message"]


@pytest.mark.parametrize("sign", ["x", "\N{GRINNING FACE}", "\n", "'"])
def test_an_error_about_a_long_name_is_still_that_error(channel: grpc.Channel, sign: str) -> None:
    stub = pb_grpc.ControllerStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ListNodes(pb.ListNodesRequest(node=sign * 100_000), timeout=5)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND
    detail = json.loads(dict(error.trailing_metadata())["rltune-error-bin"])
    assert detail["message"].startswith("there is no node ")


def test_all_or_none_and_once_by_request_id(channel: grpc.Channel) -> None:
    stub = pb_grpc.ControllerStub(channel)
    good = pb.SubmitJobRequest(request_id="good", spec=job(hold=True))
    bad = pb.SubmitJobRequest(request_id="bad", spec=job(cpus=0))
    with pytest.raises(grpc.RpcError):
        stub.SubmitJobs(pb.SubmitJobsRequest(jobs=[good, bad]), timeout=5)
    assert not stub.ListJobs(pb.ListJobsRequest(), timeout=5).jobs
    first = stub.SubmitJobs(pb.SubmitJobsRequest(jobs=[good, good]), timeout=5).job_ids
    again = stub.SubmitJob(good, timeout=5).job_id
    assert [*first, again] == [again] * 3
    stub.CancelJobs(pb.CancelJobsRequest(job_ids=[again], actor="u"), timeout=5)


def hello(**changes: Any) -> pb.AgentMessage:
    fields = {
        "node_name": "n1",
        "node_id": "id-1",
        "boot_id": "boot",
        "instance_id": "i-1",
        "facts": pb.NodeFacts(hostname="h", cpus=1, memory_bytes=1),
        "protocol_major": PROTOCOL_MAJOR,
        **changes,
    }
    return pb.AgentMessage(hello=pb.Hello(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (hello(protocol_major=99), grpc.StatusCode.FAILED_PRECONDITION),
        (hello(node_name="a/b"), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.AgentMessage(heartbeat=pb.Telemetry()), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_session_that_begins_badly_is_refused(
    channel: grpc.Channel, first: pb.AgentMessage, code: grpc.StatusCode
) -> None:
    stub = pb_grpc.AgentGatewayStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(stub.AgentSession(iter([first]), timeout=5)))
    error: Any = caught.value
    assert error.code() is code
    assert error.details()


def test_a_silent_node_goes_down_and_a_second_one_of_its_name_is_refused(
    channel: grpc.Channel, wait_until: Callable[..., None]
) -> None:
    stub = pb_grpc.AgentGatewayStub(channel)
    controller = pb_grpc.ControllerStub(channel)
    quiet = _OpenEnd(hello())
    session = stub.AgentSession(quiet, timeout=30)
    assert next(session).WhichOneof("body") == "welcome"
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.AgentSession(iter([hello(node_id="other", instance_id="i-2")]), timeout=5))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS

    def state() -> str:
        return controller.ListNodes(pb.ListNodesRequest(), timeout=5).nodes[0].state

    assert state() == "UP"
    wait_until(lambda: state() == "DOWN", timeout_s=15, describe=state)
    quiet.close()
    session.cancel()


class _OpenEnd:
    """Messages, then silence until it is closed."""

    def __init__(self, *messages: pb.AgentMessage) -> None:
        self._queue: queue.Queue[pb.AgentMessage | None] = queue.Queue()
        for message in messages:
            self._queue.put(message)

    def __iter__(self) -> Iterator[pb.AgentMessage]:
        return self

    def __next__(self) -> pb.AgentMessage:
        message = self._queue.get()
        if message is None:
            raise StopIteration
        return message

    def close(self) -> None:
        self._queue.put(None)
