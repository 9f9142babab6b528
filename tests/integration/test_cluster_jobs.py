"""Real jobs on a real local cluster: the right end, on the right GPUs, once."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.messages import GpuView, JobState, JobView, OomKind, StopReason
from testbed.client import Client
from testbed.client_errors import Infeasible, NotFound, RltuneError
from testbed.job_request import JobRequest
from testbed.local import LocalCluster

PYTHON = os.environ.get("PYTHON_FOR_JOBS", "python")
EATER = "b = bytearray(1 << 20)\nwhile True: b += bytearray(8 << 20)\n"
TRAP = "trap '' TERM; sleep 300 & wait; wait; wait"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(["P100:4", "P100:4"]) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Client:
    return cluster.client


def request(*argv: str, **options: object) -> JobRequest:
    return JobRequest(argv=argv, cwd="/", **options)  # type: ignore[arg-type]


def held_by(client: Client, job_id: int) -> list[GpuView]:
    return [gpu for gpu in client.gpus() if gpu.job_id == job_id]


def marked_processes(job_id: int, state_dir: Path) -> list[int]:
    """Processes of this machine that carry the mark of one of the job's attempts."""
    mark = f"RLTUNE_ATTEMPT_DIR={state_dir}".encode()
    found = []
    for proc in Path("/proc").iterdir():
        if not proc.name.isdecimal():
            continue
        try:
            env = (proc / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RLTUNE_JOB_ID={job_id}".encode() in env and any(e.startswith(mark) for e in env):
            found.append(int(proc.name))
    return found


def test_two_gpus_of_eight_and_nobody_elses(
    client: Client, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    say = 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 60'
    wanted = client.submit(request("sh", "-c", say, gpus=2, gpu_types=("P100",)))
    others = client.submit_many([request("sh", "-c", say, gpus=1) for _ in range(7)])
    wait_until(
        lambda: sum(j.state is JobState.RUNNING for j in client.jobs(limit=8)) == 7,
        describe=lambda: [(j.job_id, j.state, j.reason) for j in client.jobs(limit=8)],
    )
    mine = held_by(client, wanted)
    assert len(mine) == 2
    assert len({gpu.node for gpu in mine}) == 1
    (rank,) = client.job(wanted).attempts[-1].ranks
    assert set(rank.gpu_uuids) == {gpu.facts.uuid for gpu in mine}
    visible = b"".join(piece.data for piece in client.logs(wanted)).decode().strip()
    assert visible == ",".join(rank.gpu_uuids)
    held = Counter(gpu.job_id for gpu in client.gpus())
    assert held.pop(None, 0) == 0
    assert sum(held.values()) == 8
    waiting = [j for j in client.jobs(job_ids=others) if j.state is JobState.PENDING]
    assert len(waiting) == 1
    assert waiting[0].reason == "Resources"
    wait_until(
        lambda: all(
            g.sample and g.sample.processes and g.sample.memory_used_bytes
            for g in held_by(client, wanted)
        ),
        describe=lambda: held_by(client, wanted),
    )
    pids = {p.pid for g in held_by(client, wanted) for p in (g.sample and g.sample.processes) or ()}
    assert rank.pid in pids
    client.cancel([wanted, *others])
    ended = client.wait([wanted, *others], timeout_s=30)
    assert {j.state for j in ended} == {JobState.CANCELLED}
    wait_until(lambda: all(g.job_id is None for g in client.gpus()))


def test_200_short_jobs_end_as_they_should_each_once(
    cluster: LocalCluster, client: Client, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    once = tmp_path / "once"
    once.mkdir()

    def job(number: int, script: str, **options: object) -> JobRequest:
        return request("sh", "-c", f'echo >> "{once}/{number}"; {script}', **options)

    kinds: list[tuple[Callable[[int], JobRequest], Callable[[JobView], bool]]] = [
        (lambda n: job(n, "true", gpus=1), lambda j: _ended(j, JobState.COMPLETED, code=0)),
        (lambda n: job(n, "exit 7", gpus=1), lambda j: _ended(j, JobState.FAILED, code=7)),
        (lambda n: job(n, "false"), lambda j: _ended(j, JobState.FAILED, code=1)),
        (lambda n: job(n, "kill -9 $$", gpus=2), lambda j: _ended(j, JobState.FAILED, sig=9)),
        (lambda n: job(n, "kill -SEGV $$"), lambda j: _ended(j, JobState.FAILED, sig=11)),
        (lambda n: job(n, "true"), lambda j: _ended(j, JobState.COMPLETED, code=0)),
        (
            lambda n: job(n, "exec sleep 60", time_limit_s=0.5, grace_s=5.0),
            lambda j: _ended(j, JobState.TIMEOUT, sig=15, stop=StopReason.TIME_LIMIT),
        ),
        (
            lambda n: job(n, "trap 'exit 0' TERM; sleep 60 & wait", time_limit_s=0.5, grace_s=5.0),
            lambda j: _ended(j, JobState.TIMEOUT, code=0, stop=StopReason.TIME_LIMIT),
        ),
        (lambda n: job(n, "exit 0", gpus=4), lambda j: _ended(j, JobState.COMPLETED, code=0)),
        (
            lambda n: job(n, "echo CUDA out of memory >&2; exit 1", gpus=1),
            lambda j: _ended(j, JobState.OUT_OF_MEMORY, code=1, oom=OomKind.CUDA),
        ),
    ]
    jobs = [kinds[n % len(kinds)][0](n) for n in range(196)]
    jobs += [
        job(n, f'exec {PYTHON} -c "{EATER}"', memory_bytes=96 << 20, gpus=1)
        for n in range(196, 200)
    ]
    job_ids = client.submit_many(jobs)
    assert len(set(job_ids)) == 200
    ended = client.wait(job_ids, timeout_s=110)
    wrong = [
        (j.job_id, j.state, j.exit, j.spec.argv[2])
        for n, j in enumerate(ended[:196])
        if not kinds[n % len(kinds)][1](j)
    ]
    assert wrong == []
    for job_view in ended[196:]:
        assert job_view.state is JobState.OUT_OF_MEMORY
        assert job_view.exit is not None
        assert job_view.exit.oom is OomKind.HOST
    assert {p.name: p.read_text().count("\n") for p in once.iterdir()} == {
        str(n): 1 for n in range(200)
    }
    assert all(len(j.attempts) == 1 for j in ended)
    wait_until(lambda: all(g.job_id is None for g in client.gpus()))
    assert all(g.healthy for g in client.gpus())


def _ended(
    job: JobView,
    state: JobState,
    *,
    code: int | None = None,
    sig: int | None = None,
    stop: StopReason | None = None,
    oom: OomKind = OomKind.NONE,
) -> bool:
    facts = job.exit
    return (
        job.state is state
        and facts is not None
        and (facts.exit_code, facts.signal, facts.stop_reason, facts.oom) == (code, sig, stop, oom)
    )


@pytest.mark.parametrize("when", ["pending", "held", "starting", "running", "ending"])
def test_cancel_always_ends_and_leaves_nothing(
    cluster: LocalCluster, client: Client, wait_until: Callable[..., None], when: str
) -> None:
    blocker = None
    if when == "pending":
        blocker = client.submit_many([request("sleep", "300", gpus=4, grace_s=1.0)] * 2)
        wait_until(lambda: all(g.job_id is not None for g in client.gpus()))
    job_id = client.submit(
        request("sh", "-c", TRAP, gpus=1, grace_s=0.5, hold=when == "held"),
    )
    if when in {"running", "ending"}:
        wait_until(lambda: client.job(job_id).state is JobState.RUNNING)
    if when == "ending":
        client.cancel([job_id])
    (result,) = client.cancel([job_id], reason="test")
    assert result.ok
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.CANCELLED
    wait_until(lambda: not marked_processes(job_id, cluster.state_dir))
    if blocker:
        client.cancel(blocker)
        client.wait(blocker, timeout_s=20)
    wait_until(lambda: all(g.job_id is None for g in client.gpus()), describe=client.gpus)
    (again,) = client.cancel([job_id])
    assert again.ok
    assert "CANCELLED" in again.message


def test_a_job_over_two_nodes_starts_once_on_each(client: Client) -> None:
    show = 'echo "$RLTUNE_NODE_RANK $RLTUNE_NNODES $NPROC_PER_NODE $MASTER_PORT"'
    job_id = client.submit(request("sh", "-c", show, gpus=6, nodes=2))
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.COMPLETED
    lines: dict[int, bytes] = {}
    for piece in client.logs(job_id):
        lines[piece.node_rank] = lines.get(piece.node_rank, b"") + piece.data
    words = {rank: line.split() for rank, line in lines.items()}
    assert [words[r][:3] for r in (0, 1)] == [[b"0", b"2", b"3"], [b"1", b"2", b"3"]]
    assert words[0][3] == words[1][3] != b"0"


def test_a_failed_rank_stops_the_others(client: Client, wait_until: Callable[..., None]) -> None:
    script = 'if [ "$RLTUNE_NODE_RANK" = 1 ]; then exit 5; fi; exec sleep 300'
    job_id = client.submit(request("sh", "-c", script, gpus=2, nodes=2, grace_s=2.0))
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.FAILED
    assert job.exit is not None
    assert job.exit.exit_code == 5
    assert job.exit_node_rank == 1
    wait_until(lambda: all(g.job_id is None for g in client.gpus()))


def test_a_job_without_gpus_sees_none(client: Client) -> None:
    job_id = client.submit(request("sh", "-c", 'echo "[${CUDA_VISIBLE_DEVICES-unset}]"'))
    client.wait([job_id], timeout_s=20)
    assert b"".join(p.data for p in client.logs(job_id)) == b"[]\n"


def test_launch_faults_of_the_job_fail_at_once_and_blame_no_node(client: Client) -> None:
    job_ids = client.submit_many(
        [
            JobRequest(argv=("true",), cwd="/no/such/folder"),
            request("no-such-program-here"),
            request("/etc/passwd"),
        ]
    )
    jobs = client.wait(job_ids, timeout_s=20)
    assert [j.state for j in jobs] == [JobState.FAILED] * 3
    assert all(len(j.attempts) == 1 for j in jobs)
    texts = [j.exit.message for j in jobs if j.exit]
    assert "/no/such/folder" in texts[0]
    assert "no-such-program-here" in texts[1]
    assert "/etc/passwd" in texts[2]
    assert {n.state for n in client.nodes()} == {"UP"}


def test_requeue_runs_again_and_final_is_final(
    client: Client, wait_until: Callable[..., None]
) -> None:
    job_id = client.submit(request("sh", "-c", 'echo "attempt $RLTUNE_ATTEMPT"'))
    client.wait([job_id], timeout_s=20)
    (result,) = client.requeue([job_id])
    assert result.ok
    wait_until(lambda: len(client.job(job_id).attempts) == 2)
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.COMPLETED
    assert b"".join(p.data for p in client.logs(job_id, attempt=1)) == b"attempt 1\n"
    assert b"".join(p.data for p in client.logs(job_id)) == b"attempt 2\n"


def test_hold_and_release(client: Client, wait_until: Callable[..., None]) -> None:
    job_id = client.submit(request("true", hold=True))
    assert client.job(job_id).state is JobState.HELD
    (released,) = client.release([job_id])
    assert released.ok
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.COMPLETED


def test_drain_lets_jobs_finish_and_takes_no_new_ones(
    client: Client, wait_until: Callable[..., None]
) -> None:
    running = client.submit(request("sleep", "60", gpus=4, grace_s=1.0))
    wait_until(lambda: client.job(running).state is JobState.RUNNING)
    node = client.job(running).attempts[-1].ranks[0].node
    client.drain(node, reason="test of draining")
    other = next(n.name for n in client.nodes() if n.name != node)
    small = client.submit(request("true", gpus=4))
    (job,) = client.wait([small], timeout_s=20)
    assert job.attempts[-1].ranks[0].node == other
    states = {n.name: n for n in client.nodes()}
    assert states[node].state == "DRAINING"
    assert any("test of draining" in r for r in states[node].reasons)
    client.cancel([running])
    client.wait([running], timeout_s=20)
    wait_until(lambda: next(n for n in client.nodes() if n.name == node).state == "DRAINED")
    client.resume(node)
    assert {n.state for n in client.nodes()} == {"UP"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 999}, ["999", "4"]),
        ({"gpus": 1, "gpu_types": ("H100",)}, ["H100", "P100"]),
        ({"gpus": 8}, ["8", "--nodes 2"]),
        ({"memory_bytes": 1 << 49}, ["memory"]),
        ({"cpus": 60_000}, ["CPU"]),
    ],
)
def test_what_can_never_fit_is_refused(
    client: Client, options: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(Infeasible) as caught:
        client.submit(request("true", **options))
    said = f"{caught.value} {caught.value.hint}"
    assert all(word.lower() in said.lower() for word in words), said


def test_unknown_ids_are_told(client: Client) -> None:
    with pytest.raises(NotFound):
        client.job(10**9)
    (result,) = client.cancel([10**9])
    assert not result.ok
    with pytest.raises(RltuneError):
        client.drain("no-such-node", reason="x")


def test_the_same_request_id_makes_one_job(client: Client) -> None:
    first = client.submit(request("true"), request_id="only-once")
    again = client.submit(request("true"), request_id="only-once")
    assert first == again


def test_events_tell_the_story_in_order(client: Client) -> None:
    job_id = client.submit(request("true", name='odd "name" [red]\u2603'))
    client.wait([job_id], timeout_s=20)
    events = list(client.events(job_ids=[job_id]))
    assert [e.event_id for e in events] == sorted({e.event_id for e in events})
    kinds = [e.kind for e in events]
    assert kinds[0] == "JobSubmitted"
    assert len(kinds) >= 4
    assert json.dumps([e.text for e in events])


def test_output_comes_back_byte_for_byte(client: Client, tmp_path: Path) -> None:
    blob = bytes(range(256)) * 4096 + b"\rprogress 1\rprogress 2\n\xff\xfe no newline"
    source = tmp_path / "blob"
    source.write_bytes(blob)
    job_id = client.submit(request("cat", str(source)))
    client.wait([job_id], timeout_s=20)
    assert b"".join(p.data for p in client.logs(job_id, follow=True)) == blob


def test_explain_says_why_with_numbers(client: Client, wait_until: Callable[..., None]) -> None:
    fillers = client.submit_many([request("sleep", "60", gpus=3, grace_s=1.0)] * 2)
    wait_until(lambda: all(j.state is JobState.RUNNING for j in client.jobs(job_ids=fillers)))
    waiting = client.submit(request("true", gpus=2))
    wait_until(lambda: client.job(waiting).reason == "Resources")
    explanation = client.explain(waiting)
    assert "2" in explanation.text
    assert "1 free" in explanation.text
    client.cancel([*fillers, waiting])
    client.wait([*fillers, waiting], timeout_s=20)
