"""One cycle as a table: who starts, why the others wait, and the words for it."""

import pickle
import subprocess
import sys
import time

import pytest

from controller.scheduler.allocator.verify import InvalidPlacement
from controller.scheduler.cycle import decide
from controller.scheduler.explain import describe, explain_start, explain_wait
from controller.scheduler.feasibility import never_fits
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    Placement,
    RankPlacement,
    RunningJob,
    Start,
    WaitingJob,
    WaitNote,
    WaitReason,
)
from protos.messages import JobSpec

GIB = 1024**3


def job(job_id, gpus=1, *, types=(), excluded=(), not_before=0.0, at=None, **spec):
    fields = {"name": "j", "user": "ada", "argv": ("true",), "cwd": "/"} | spec
    at = float(job_id) if at is None else at
    return WaitingJob(
        job_id,
        JobSpec(gpus=gpus, gpu_types=tuple(types), **fields),
        at,
        at,
        excluded_nodes=frozenset(excluded),
        not_before_s=not_before,
    )


def node(name, free, capacity, gpu_type="P100", *, cpus=64, memory=256 * GIB, reasons=()):
    slots = tuple(
        GpuSlot(f"{name}-{i}", i, gpu_type, i >= capacity - free) for i in range(capacity)
    )
    return NodeCapacity(name, not reasons, slots, 64, cpus, 256 * GIB, memory, tuple(reasons))


def cluster(*nodes, **fields):
    return ClusterView(nodes, **fields)


def cycle(queue, view, now_s=100.0, *, policy="fcfs", allocator=None, **options):
    return decide(
        queue,
        view,
        now_s,
        prioritizer=make_prioritizer(policy),
        allocator=allocator or make_allocator("greedy"),
        **options,
    )


def reasons(decision):
    return {job_id: note.reason for job_id, note in decision.waits.items()}


@pytest.mark.parametrize(
    ("queue", "view", "starts", "waits"),
    [
        pytest.param([], cluster(), [], {}, id="nothing"),
        pytest.param([job(1)], cluster(), [], {1: WaitReason.RESOURCES}, id="no node is known"),
        pytest.param([job(1)], cluster(node("n1", 4, 4)), [1], {}, id="starts"),
        pytest.param(
            [job(1, 4), job(2, 2)],
            cluster(node("n1", 4, 4)),
            [1],
            {2: WaitReason.PRIORITY},
            id="an earlier job took the room",
        ),
        pytest.param(
            [job(1, 4)], cluster(node("n1", 3, 4)), [], {1: WaitReason.RESOURCES}, id="no room"
        ),
        pytest.param(
            [job(1, 4)],
            cluster(node("n1", 3, 4), node("n2", 4, 4, reasons=["drained"])),
            [],
            {1: WaitReason.NODE_DRAINED},
            id="a drained node would do",
        ),
        pytest.param(
            [job(1, 4)],
            cluster(node("n1", 3, 4), node("n2", 0, 4, reasons=["drained"])),
            [],
            {1: WaitReason.RESOURCES},
            id="a drained node that is full would not",
        ),
        pytest.param(
            [job(1, 8)], cluster(node("n1", 4, 4)), [], {1: WaitReason.NEVER_FITS}, id="never fits"
        ),
        pytest.param(
            [job(1, not_before=101.0), job(2, not_before=100.0)],
            cluster(node("n1", 4, 4)),
            [2],
            {1: WaitReason.BACKOFF},
            id="back-off over at its last instant",
        ),
        pytest.param(
            [job(1, excluded=["n1"])],
            cluster(node("n1", 4, 4)),
            [],
            {1: WaitReason.BACKOFF},
            id="its only node is excluded",
        ),
        pytest.param(
            [job(1, priority=-1), job(2, 4)],
            cluster(node("n1", 4, 4)),
            [2],
            {1: WaitReason.PRIORITY},
            id="priority is respected",
        ),
        pytest.param(
            [job(1, 8), *(job(i, 4) for i in range(2, 5))],
            cluster(node("n1", 4, 4)),
            [2],
            {1: WaitReason.NEVER_FITS, 3: WaitReason.PRIORITY, 4: WaitReason.NOT_CONSIDERED},
            id="never-fitting jobs take no place in a window of 2",
        ),
    ],
)
def test_decide(queue, view, starts, waits):
    decision = cycle(queue, view, window=2)
    assert [start.job_id for start in decision.starts] == starts
    assert reasons(decision) == waits


def test_decision_names_its_policy_and_when_to_wake():
    queue = [job(1, not_before=130.0), job(2, not_before=120.0), job(3)]
    decision = cycle(queue, cluster(node("n1", 4, 4)), policy="sjf")
    assert (decision.policy, decision.allocator) == ("sjf", "greedy")
    assert decision.wake_at_s == 120.0
    assert decision.waits[1].until_s == 130.0
    assert [entry.job.job_id for entry in decision.ranking] == [3]
    assert cycle([job(3)], cluster(node("n1", 4, 4))).wake_at_s is None


def test_note_has_the_numbers_after_this_cycles_starts():
    view = cluster(node("n1", 2, 4), node("n2", 3, 4), node("t1", 4, 4, "T4"))
    decision = cycle([job(1, 1, types=["P100"]), job(2, 4, types=["P100"])], view)
    assert decision.waits[2] == WaitNote(
        WaitReason.RESOURCES,
        gpus_needed=4,
        best_node="n2",
        best_node_free_gpus=3,
        best_node_free_cpus=64,
        best_node_free_memory_bytes=256 * GIB,
        free_gpus=4,
        short_of="gpus",
        ahead=1,
    )


@pytest.mark.parametrize(
    ("waiting", "view", "words"),
    [
        (
            job(9, 4, types=["P100"]),
            cluster(node("n1", 2, 4), node("n2", 3, 4)),
            "needs 4 P100 on one node; the best node (n2) has 3 free",
        ),
        (
            job(9, 8, nodes=2),
            cluster(node("n1", 4, 4), node("n2", 3, 4)),
            "needs 4 GPUs on each of 2 nodes; only 1 node of one type has room",
        ),
        (
            job(9, 1, cpus=8),
            cluster(node("n1", 4, 4, cpus=3)),
            "needs 8 CPUs beside 1 GPU on one node; the best node (n1) has 3 CPUs free",
        ),
        (
            job(9, 0, cpus=8),
            cluster(node("n1", 4, 4, cpus=1)),
            "needs 8 CPUs on one node; the best node (n1) has 1 CPU free",
        ),
        (
            job(9, 1, memory_bytes=100 * GIB),
            cluster(node("n1", 4, 4, memory=50 * GIB)),
            (
                "needs 100.0 GiB of memory beside 1 GPU on one node; "
                "the best node (n1) has 50.0 GiB free"
            ),
        ),
        (job(9, 1), cluster(), "needs 1 GPU on one node; no node that takes work has such GPUs"),
        (job(9, 0), cluster(), "needs 1 CPU on one node; no node takes work"),
        (
            job(9, 1),
            cluster(node("n1", 4, 4, reasons=["drained: new disk"])),
            (
                "needs 1 GPU on one node; there would be room on nodes that take no work now: "
                "n1 (drained: new disk)"
            ),
        ),
        (
            job(9, 1),
            cluster(*(node(f"n{i}", 4, 4, reasons=["silent"]) for i in range(5))),
            (
                "needs 1 GPU on one node; there would be room on nodes that take no work now: "
                "n0 (silent), n1 (silent), n2 (silent) and 2 more"
            ),
        ),
        (
            job(9, excluded=["n1"]),
            cluster(node("n1", 4, 4)),
            "its launch failed lately on n1; no other node has room",
        ),
        (
            job(9, not_before=200.0),
            cluster(node("n1", 4, 4)),
            "its last launch failed; it is tried again after a pause",
        ),
        (
            job(9, 8),
            cluster(node("n1", 4, 4)),
            "needs 8 P100 on one node; the largest node (n1) has 4 P100; ask --gpus 4",
        ),
    ],
)
def test_words_of_a_wait(waiting, view, words):
    decision = cycle([waiting], view)
    assert describe(decision.waits[9], waiting.spec) == words
    assert explain_wait(9, waiting.spec, decision)[0] == words


def test_words_of_priority_window_and_hold():
    view = cluster(node("n1", 4, 4))
    queue = [job(1, 4), job(2, 2), job(3, 2)]
    decision = cycle(queue, view, window=2)
    assert describe(decision.waits[2], queue[1].spec) == (
        "there was room for 2 GPUs on one node, but 1 job before it in the order took it"
    )
    assert describe(decision.waits[3], queue[2].spec) == (
        "2 jobs are before it; one cycle looks at fewer than that"
    )
    held = describe(WaitNote(WaitReason.HELD), queue[0].spec)
    assert held == "held; release it to let it run"


def test_explain_wait_tells_the_terms_of_the_priority():
    view = cluster(node("n1", 4, 4))
    queue = [job(1, 4, at=0.0), job(2, 2, at=0.0)]
    decision = cycle(queue, view, 4320.0, policy="multifactor")
    assert [start.job_id for start in decision.starts] == [2]
    lines = explain_wait(1, queue[0].spec, decision)
    assert lines[1] == (
        "priority 1,600.0 = age 100.0 + job size 0.0 + fair share 1,000.0 + qos 500.0"
        " + priority 0.0; 1 job before it"
    )
    assert explain_wait(2, queue[1].spec, decision) == ()
    shortage = cycle([job(1, 4)], cluster(node("n1", 3, 4), node("n2", 2, 4)))
    assert explain_wait(1, queue[0].spec, shortage)[2] == "5 GPUs free in the whole cluster"


def test_explain_start_tells_where_and_why():
    view = cluster(node("n1", 4, 4), node("n2", 3, 4), node("t1", 0, 4, "T4"))
    queue = [job(1, 1, types=["T4", "P100"])]
    decision = cycle(queue, view)
    assert explain_start(decision.starts[0], queue[0].spec, decision) == (
        "started on n2 (GPU 1)",
        "ordered by fcfs: priority 0; 0 jobs before it",
        "leaves 2 GPUs of that type free there; its GPU type number 2 of 2",
    )
    cpu = cycle([job(2, 0)], view)
    assert explain_start(cpu.starts[0], job(2, 0).spec, cpu)[0] == "started on t1"


def test_fallback_and_limit_are_told():
    view = cluster(node("n1", 3, 4), node("n2", 2, 2))
    queue = [job(1), job(2, 2)]
    without = make_allocator("milp", no_solver="glpsol was not found")
    decision = cycle(queue, view, allocator=without)
    assert decision.fallback == "glpsol was not found"
    lines = explain_start(decision.starts[0], queue[0].spec, decision)
    assert lines[-1] == "placed by greedy: glpsol was not found"
    hurried = cycle(queue, view, allocator=make_allocator("milp", solver=object(), time_limit_s=0))
    lines = explain_start(hurried.starts[0], queue[0].spec, hurried)
    assert lines[-1] == "the milp allocator was cut short by its limit"


class Broken:
    """An allocator with a defect."""

    name = "broken"

    def place(self, ranked, cluster, now_s):
        rank = RankPlacement("n1", ("n1-0",), (0,))
        return Placement(tuple(Start(entry.job.job_id, (rank,)) for entry in ranked))


def test_a_placement_that_books_twice_never_leaves_the_cycle():
    with pytest.raises(InvalidPlacement, match="job 2 on n1: GPU 0"):
        cycle([job(1), job(2)], cluster(node("n1", 4, 4)), allocator=Broken())


def running(job_id, name, indices, *, started=0.0, limit=None):
    ranks = (RankPlacement(name, tuple(f"{name}-{i}" for i in indices), tuple(indices)),)
    return RunningJob(job_id, "bob", len(indices), started, limit, ranks)


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        pytest.param(2, 1, 150.0, id="first limit gives enough"),
        pytest.param(4, 1, 300.0, id="second limit is needed"),
        pytest.param(4, 2, 150.0, id="over two nodes: the later of them"),
        pytest.param(8, 2, None, id="a job without limit is in the way"),
    ],
)
def test_note_tells_when_limits_free_enough(gpus, nodes, expected):
    view = cluster(
        node("n1", 0, 4),
        node("n2", 1, 4),
        running=(
            running(1, "n1", [0, 1], limit=150.0),
            running(2, "n1", [2, 3], started=100.0, limit=200.0),
            running(3, "n2", [0], limit=50.0),
            running(4, "n2", [1, 2], started=None, limit=10.0),
        ),
    )
    note = cycle([job(9, gpus, nodes=nodes)], view).waits[9]
    if gpus == 2:
        assert note.until_s == 100.0
        return
    assert note.until_s == expected


def test_a_limit_that_has_passed_counts_as_now_and_this_cycles_starts_count():
    view = cluster(node("n1", 1, 2), running=(running(1, "n1", [0], limit=10.0),))
    decision = cycle([job(2, time_limit_s=60.0), job(3, 2)], view)
    assert decision.waits[3].until_s == 160.0
    assert cycle([job(3, 2)], view).waits[3].until_s == 100.0


P4 = (node("node-1", 0, 4, reasons=["down"]), node("node-2", 4, 4))


@pytest.mark.parametrize(
    ("spec", "view", "words"),
    [
        ({"gpus": 4}, cluster(*P4), None),
        ({"gpus": 8, "nodes": 2}, cluster(*P4), None),
        ({"gpus": 99}, cluster(), None),
        (
            {"gpus": 8},
            cluster(*P4),
            (
                "needs 8 P100 on one node; the largest node (node-1) has 4 P100; "
                "ask --nodes 2 or --gpus 4"
            ),
        ),
        (
            {"gpus": 7},
            cluster(*P4),
            "needs 7 P100 on one node; the largest node (node-1) has 4 P100; ask --gpus 4",
        ),
        (
            {"gpus": 12, "nodes": 3},
            cluster(*P4),
            (
                "needs 3 nodes with 4 P100 each; the cluster has 2 of that kind; "
                "ask --nodes 2 --gpus 8"
            ),
        ),
        (
            {"gpus": 15, "nodes": 3},
            cluster(*P4),
            "needs 5 P100 on one node; the largest node (node-1) has 4 P100; ask fewer GPUs",
        ),
        (
            {"gpus": 1, "types": ("A100",)},
            cluster(*P4, node("t", 1, 1, "T4")),
            "no node has GPU type A100; types here: P100, T4",
        ),
        (
            {"gpus": 8, "types": ("T4", "P100")},
            cluster(*P4, node("t", 2, 2, "T4")),
            (
                "needs 8 T4 on one node; the largest node (t) has 2 T4; ask --gpus 2; "
                "needs 8 P100 on one node; the largest node (node-1) has 4 P100; "
                "ask --nodes 2 or --gpus 4"
            ),
        ),
        (
            {"gpus": 5},
            cluster(*P4, node("t", 2, 2, "T4")),
            "needs 5 P100 on one node; the largest node (node-1) has 4 P100; ask --gpus 4",
        ),
        ({"gpus": 1}, cluster(node("c", 0, 0)), "no node has a GPU; ask --gpus 0"),
        (
            {"gpus": 1, "cpus": 65},
            cluster(*P4),
            (
                "needs 65 CPUs on one node with 1 P100; the largest (node-1) has 64; "
                "ask --cpus 64 or fewer"
            ),
        ),
        (
            {"gpus": 0, "cpus": 65},
            cluster(*P4),
            "needs 65 CPUs on one node; the largest (node-1) has 64; ask --cpus 64 or fewer",
        ),
        (
            {"gpus": 1, "memory_bytes": 257 * GIB},
            cluster(*P4),
            (
                "needs 257.0 GiB of memory on one node with 1 P100; the largest (node-1) has "
                "256.0 GiB; ask for less with --mem"
            ),
        ),
        (
            {"gpus": 0, "nodes": 3},
            cluster(*P4),
            ("needs 3 nodes with 1 CPU each; the cluster has 2 of that kind; ask --nodes 2"),
        ),
    ],
)
def test_never_fits(spec, view, words):
    assert never_fits(job(1, **spec).spec, view) == words


def test_everything_crosses_to_a_worker_process():
    queue = [job(1, 4), job(2, 2), job(3, 8)]
    view = cluster(node("n1", 4, 4), usage_gpu_s={"ada": 1.0})
    assert pickle.loads(pickle.dumps((queue, view))) == (queue, view)
    for policy in ("fcfs", "multifactor"):
        decision = cycle(queue, view, policy=policy)
        assert pickle.loads(pickle.dumps(decision)) == decision


def test_a_thousand_waiting_jobs_are_explained_in_milliseconds():
    view = cluster(*(node(f"n{i}", 0, 8) for i in range(36)))
    queue = [job(i, 1 + i % 8, user=f"u{i % 9}") for i in range(3000)]
    began = time.process_time()
    decision = cycle(queue, view, policy="multifactor", window=1000)
    spent_s = time.process_time() - began
    assert len(decision.waits) == 3000
    assert spent_s < 1.0, "about 40 ms here; a limit that only a quadratic walk can miss"


@pytest.mark.parametrize("module", ["types", "policies", "cycle", "explain", "feasibility"])
def test_importing_the_core_loads_neither_pyomo_nor_torch(module):
    code = (
        f"import sys, controller.scheduler.{module}\n"
        "print([m for m in ('pyomo', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
