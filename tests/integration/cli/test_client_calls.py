"""The client against a real gRPC server: answers lost, streams broken, controllers restarted."""

from __future__ import annotations

import socket
import threading
import time

import grpc
import pytest

from protos.messages import ExitFacts, JobSpec, JobState, LogStream
from testbed.client import Client
from testbed.client_errors import (
    ControllerUnreachable,
    Infeasible,
    InvalidRequest,
    NodeUnreachable,
    NotAllowed,
    NotFound,
    RltuneError,
    ServerFailed,
    TryAgain,
    WaitTimedOut,
)
from testbed.client_rpc import Patience, Rpc
from testbed.job_request import JobRequest


@pytest.fixture
def client(controller):
    with Client(controller.address) as client:
        yield client


def spec(**fields) -> JobSpec:
    return JobSpec(**{"name": "j", "user": "ann", "argv": ("true",), "cwd": "/", **fields})


# ------------------------------------------------------------------ submitting


def test_a_lost_answer_makes_no_second_job(client, controller):
    client.info()
    controller.lose_answers = 3
    job_id = client.submit(spec())
    assert list(controller.jobs) == [job_id]
    sent = {r.request_id for kind, r in controller.requests if kind == "SubmitJobRequest"}
    assert len(sent) == 1


def test_lost_answers_to_several_make_no_second_jobs(client, controller):
    client.info()
    controller.lose_answers = 2
    job_ids = client.submit_many([spec(name="a"), spec(name="b")])
    assert [controller.jobs[job_id].spec.name for job_id in job_ids] == ["a", "b"]
    assert len(controller.jobs) == 2


def test_two_submissions_are_two_jobs(client, controller):
    assert client.submit(spec()) != client.submit(spec())


def test_a_spec_arrives_as_it_was_given(client, controller):
    given = spec(
        argv=("sh", "-c", "echo \udcff\n'"),
        env={"A": "\udcfe", "B": ""},
        cwd="/tmp/\udcff x",
        gpus=4,
        gpu_types=("P100", "V100"),
        nodes=2,
        time_limit_s=90.0,
        hold=True,
    )
    assert client.job(client.submit(given)).spec == given


def test_a_request_gets_the_clients_user_and_folder(controller):
    with Client(controller.address, user="bob") as client:
        job = client.job(client.submit(JobRequest(argv=("true",))))
    assert job.spec.user == "bob"
    assert job.spec.cwd.startswith("/")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"gpus": -1}, "spec.gpus"),
        ({"gpus": 3, "nodes": 2}, "spec.gpus"),
        ({"name": "a\nb"}, "spec.name"),
        ({"argv": ()}, "spec.argv"),
        ({"env": {"A": "x" * 200_000}}, "spec.env['A']"),
        ({"time_limit_s": -1.0}, "spec.time_limit_s"),
    ],
)
def test_a_broken_rule_is_told_without_asking_the_controller(client, controller, fields, field):
    with pytest.raises(InvalidRequest) as refused:
        client.submit(spec(**fields))
    assert refused.value.field == field
    assert controller.requests == []


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.FAILED_PRECONDITION, Infeasible),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.PERMISSION_DENIED, NotAllowed),
        (grpc.StatusCode.UNAUTHENTICATED, NotAllowed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TryAgain),
        (grpc.StatusCode.UNAVAILABLE, TryAgain),
        (grpc.StatusCode.INTERNAL, ServerFailed),
        (grpc.StatusCode.UNIMPLEMENTED, ServerFailed),
    ],
)
def test_what_the_controller_says_reaches_the_caller(client, controller, refusal, status, kind):
    detail = {"code": "some_code", "message": "no (do this)", "hint": "do this", "field": "f"}
    controller.refusals = [refusal(status, detail)]
    with pytest.raises(RltuneError) as refused:
        client.job(1)
    error = refused.value
    assert type(error) is kind
    assert (error.code, error.message, error.hint, error.field) == (
        "some_code", "no", "do this", "f",
    )  # fmt: skip
    assert len(controller.requests) == 1


def test_a_node_that_is_gone_has_its_own_error(client, controller, refusal):
    controller.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, {"code": "node_unreachable"})]
    with pytest.raises(NodeUnreachable):
        client.job(1)


def test_without_a_description_the_status_decides(client, controller, refusal):
    controller.refusals = [refusal(grpc.StatusCode.INTERNAL)]
    with pytest.raises(ServerFailed) as refused:
        client.job(1)
    assert refused.value.code == "server_failed"


def test_an_address_that_is_none_is_refused_at_once():
    for address in ("", "nowhere"):
        with pytest.raises(InvalidRequest):
            Client(address)


def test_an_unreachable_controller_makes_a_short_traceback():
    with Client("127.0.0.1:1", patience_s=0.0) as client:
        with pytest.raises(ControllerUnreachable) as refused:
            client.jobs()
        assert refused.value.__context__ is None
        with pytest.raises(ControllerUnreachable) as refused:
            client.requeue([1])
        assert refused.value.__context__ is None


def test_without_patience_it_is_told_at_once():
    pauses: list[float] = []
    rpc = Rpc("127.0.0.1:1", patience_s=0.0, pause=pauses.append)
    with Client("127.0.0.1:1", rpc=rpc) as client, pytest.raises(ControllerUnreachable):
        client.jobs()
    assert pauses == []


def test_a_refused_connection_is_told_within_three_seconds():
    begun = time.monotonic()
    with Client("127.0.0.1:1") as client, pytest.raises(ControllerUnreachable) as refused:
        client.jobs()
    assert time.monotonic() - begun < 3
    assert "127.0.0.1:1" in refused.value.message
    assert "refused" in refused.value.message
    assert "rltune up" in refused.value.hint


def test_a_listener_that_stays_silent_is_no_reason_to_start_another_controller():
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        with Client(address) as client, pytest.raises(ControllerUnreachable) as refused:
            client.jobs()
    assert address in refused.value.message
    assert "accepts connections but does not answer" in refused.value.message
    assert "rltune up" not in refused.value.hint


def test_a_controller_that_falls_silent_is_told_as_such(client, controller, refusal):
    job_id = controller.add(JobState.RUNNING)
    controller.refusals = [refusal(grpc.StatusCode.DEADLINE_EXCEEDED)]
    with pytest.raises(ControllerUnreachable) as refused:
        client.requeue([job_id])
    assert "accepts connections but does not answer" in refused.value.message
    assert "rltune up" not in refused.value.hint


def test_an_address_without_a_machine_is_told_within_bounds():
    begun = time.monotonic()
    with Client("nosuchhost.invalid:7817") as client, pytest.raises(ControllerUnreachable):
        client.jobs()
    assert time.monotonic() - begun < 12


def test_a_proxy_of_the_environment_is_not_used(controller, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with Client(controller.address) as client:
        assert client.info().cluster == "rltune"


def test_a_controller_that_comes_up_a_moment_later_is_found(controller):
    controller.stop()
    starter = threading.Timer(0.4, controller.start)
    starter.start()
    with Client(controller.address) as client:
        assert client.info().cluster == "rltune"
    starter.join()


def test_requeue_is_not_repeated_when_its_answer_is_lost(client, controller, refusal):
    job_id = controller.add(JobState.RUNNING)
    controller.refusals = [refusal(grpc.StatusCode.UNAVAILABLE)]
    with pytest.raises(ControllerUnreachable):
        client.requeue([job_id])
    assert [kind for kind, _ in controller.requests] == ["JobActionsRequest"]


def test_patience_grows_with_jitter_and_ends():
    now = [0.0]
    waited = []

    def pause(delay_s: float) -> None:
        waited.append(delay_s)
        now[0] += delay_s

    patience = Patience(10.0, lambda: now[0], pause, lambda: 0.999)
    error = ControllerUnreachable("gone")

    def spend_all():
        for _ in range(1000):
            patience.spend(error)

    with pytest.raises(ControllerUnreachable):
        spend_all()
    assert waited[0] < 0.06
    assert waited == sorted(waited)
    assert waited[-1] == pytest.approx(2, rel=0.01)
    assert 8 < now[0] < 10
    with pytest.raises(NotFound):
        Patience(10.0, lambda: 0.0, pause, lambda: 0.5).spend(NotFound("x"))


# ------------------------------------------------------------------ lists and actions


def test_all_pages_are_read_newest_first(client, controller):
    controller.page = 3
    job_ids = [controller.add() for _ in range(8)]
    assert [job.job_id for job in client.jobs()] == job_ids[::-1]
    assert [job.job_id for job in client.jobs(limit=4)] == job_ids[:3:-1]
    assert [job.job_id for job in client.jobs(job_ids=job_ids[:5])] == job_ids[4::-1]


def test_filters_reach_the_controller(client, controller):
    a = controller.add(JobState.RUNNING, name="a", user="ann")
    controller.add(JobState.PENDING, name="a", user="bob")
    assert [j.job_id for j in client.jobs(states=[JobState.RUNNING], user="ann", name="a")] == [a]


def test_actions_answer_for_each_job(client, controller):
    waiting, ended = controller.add(), controller.add(JobState.COMPLETED)
    results = client.cancel([waiting, ended, 99], reason="test")
    assert [(r.job_id, r.ok, r.state) for r in results] == [
        (waiting, True, JobState.CANCELLED),
        (ended, True, JobState.COMPLETED),
        (99, False, None),
    ]
    assert controller.requests[-1][1].reason == "test"
    assert controller.requests[-1][1].actor == client.user


# ------------------------------------------------------------------ waiting


def test_wait_returns_when_the_last_job_ends(client, controller):
    a, b = controller.add(JobState.RUNNING), controller.add(JobState.RUNNING)
    seen = []

    def on_end(job):
        seen.append(job.job_id)
        if job.job_id == b:
            controller.end(a, JobState.COMPLETED, ExitFacts(exit_code=0))

    threading.Timer(0.1, controller.end, (b, JobState.FAILED, ExitFacts(exit_code=3))).start()
    jobs = client.wait([a, b], timeout_s=20, on_end=on_end)
    assert [job.job_id for job in jobs] == [a, b]
    assert [job.state for job in jobs] == [JobState.COMPLETED, JobState.FAILED]
    assert seen == [b, a]


def test_wait_for_what_has_ended_returns_at_once(client, controller):
    a = controller.add()
    controller.end(a, JobState.COMPLETED, ExitFacts(exit_code=0))
    assert [job.job_id for job in client.wait([a, a])] == [a, a]
    assert client.wait([]) == []
    assert not any(kind == "WatchEventsRequest" for kind, _ in controller.requests)


def test_wait_outlives_a_restart_of_the_controller(client, controller):
    a = controller.add(JobState.RUNNING)
    done = []
    waiter = threading.Thread(target=lambda: done.extend(client.wait([a], timeout_s=30)))
    waiter.start()
    until(lambda: any(kind == "WatchEventsRequest" for kind, _ in controller.requests))
    controller.stop()
    controller.end(a, JobState.COMPLETED, ExitFacts(exit_code=0))
    controller.start()
    waiter.join(30)
    assert [job.state for job in done] == [JobState.COMPLETED]


def test_wait_outlives_a_stream_that_ends_politely(client, controller):
    a = controller.add(JobState.RUNNING)
    controller.end_event_streams = 2
    threading.Timer(0.3, controller.end, (a, JobState.COMPLETED, ExitFacts(exit_code=0))).start()
    assert client.wait([a], timeout_s=20)[0].state is JobState.COMPLETED


def test_wait_gives_up_in_time_and_leaves_no_thread(client, controller):
    a = controller.add(JobState.RUNNING)
    begun = time.monotonic()
    with pytest.raises(WaitTimedOut):
        client.wait([a], timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 3
    assert not [t for t in threading.enumerate() if t.name == "rltune-wait"]


def test_wait_for_a_job_that_does_not_exist(client):
    with pytest.raises(NotFound, match="99"):
        client.wait([99])


def until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event().wait
    while not condition():
        assert time.monotonic() < deadline
        pause(0.01)


# ------------------------------------------------------------------ streams


def test_history_ends_and_following_goes_on(client, controller):
    for _ in range(3):
        controller.add()
    assert [e.event_id for e in client.events()] == [1, 2, 3]
    assert [e.event_id for e in client.events(after_event_id=2)] == [3]
    stream = client.events(after_event_id=1, follow=True)
    assert [next(stream).event_id, next(stream).event_id] == [2, 3]
    controller.add()
    assert next(stream).event_id == 4
    stream.close()


def test_events_go_on_after_a_restart_without_gap_or_repetition(client, controller):
    controller.add()
    stream = client.events(follow=True)
    seen = [next(stream).event_id]
    controller.stop()
    controller.add()
    controller.start()
    controller.add()
    seen += [next(stream).event_id, next(stream).event_id]
    assert seen == [1, 2, 3]
    stream.close()


@pytest.mark.parametrize("breaks", [[], [1], [2, 1, 3, 4]])
def test_each_byte_of_a_log_comes_once_however_often_the_stream_breaks(client, controller, breaks):
    a = controller.add(JobState.RUNNING)
    for i in range(5):
        controller.write(b"out%d\r\xff" % i)
        controller.write(b"err%d" % i, LogStream.STDERR)
    controller.end(a, JobState.COMPLETED, ExitFacts(exit_code=0))
    controller.break_logs_after = breaks
    messages = list(client.logs(a, follow=True))
    for stream, mark in ((LogStream.STDOUT, b"out%d\r\xff"), (LogStream.STDERR, b"err%d")):
        data = b"".join(m.data for m in messages if m.stream is stream)
        assert data == b"".join(mark % i for i in range(5))


def test_a_piece_that_is_known_in_part_is_cut(client, controller):
    a = controller.add(JobState.RUNNING)
    controller.write(b"abc")
    controller.write(b"def")
    controller.break_logs_after = [1]
    controller.end(a, JobState.COMPLETED, ExitFacts(exit_code=0))
    stream = client.logs(a, follow=True)
    assert next(stream).data == b"abc"
    controller.logs[:] = [controller.logs[0]]
    controller.logs[0].data = b"abcdef"
    last = next(stream)
    assert (last.data, last.offset) == (b"def", 3)


def test_logs_of_a_job_that_does_not_exist(client):
    with pytest.raises(NotFound):
        list(client.logs(7))


# ------------------------------------------------------------------ nodes


def test_nodes_and_gpus(client):
    assert [node.name for node in client.nodes()] == ["gpu-node-1", "gpu-node-2"]
    assert [gpu.facts.index for gpu in client.gpus("gpu-node-2")] == [0, 1]
    drained = client.drain("gpu-node-1", "new disk")
    assert (drained.state, drained.reasons) == ("DRAINING", ("new disk",))
    assert client.resume("gpu-node-1").state == "UP"
    with pytest.raises(NotFound):
        client.nodes("none")


def test_a_closed_client_ends_its_streams(controller):
    rpc = Rpc(controller.address)
    client = Client(controller.address, rpc=rpc)
    controller.add()
    stream = client.events(follow=True)
    next(stream)
    closer = threading.Timer(0.1, rpc.close)
    closer.start()
    with pytest.raises(RltuneError):
        next(stream)
    closer.join()
