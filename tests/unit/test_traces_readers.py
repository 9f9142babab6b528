"""Readers of traces: what each format means, and where a mistake is."""

from pathlib import Path

import pytest

from testbed.client_errors import InvalidRequest
from testbed.simulator.workload import Options, make_jobs, offered_load
from testbed.traces.clusters import ClusterProblem, load_cluster, packaged
from testbed.traces.describe import describe
from testbed.traces.readers import READERS, detect, read_trace
from testbed.traces.table import SCHEMA, TraceProblem

SWF = """; Computer: none
    1        5     -1   1451  128     -1    -1   -1   3600    -1 -1   1   1  7 -1 2 -1 -1
    2        9     -1     -1    4     -1    -1   -1     -1    -1 -1   1   1  7 -1 2 -1 -1
    3        7     10     60   -1     -1    -1    4     -1    -1 -1   2   1 -1 -1 -1 -1 -1
"""
FILES = {
    "philly": "timestamp,duration,num_gpus,gpu_time,cluster\n"
    "2017-09-04 10:30:51,60.0,8,480.0,vc1\n2017-09-04 10:30:41,5,1,5,vc2\n",
    "helios": "job_id,user,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,"
    "duration,queue,vc,jobname\n1,u1,2,8,1,COMPLETED,2020-04-01 00:00:10,x,x,70,0,vcA,train\n",
    "openb": "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
    "deletion_time,scheduled_time\np0,6500,1024,1,1000,V100M16|V100M32,LS,Running,10,100,20\n"
    "p1,1000,1024,0,0,,BE,Pending,10,,\n",
    "simple": "job_id,submit_time,num_gpu,duration\n7,100,4,50\n",
    "rltune": "bert-2_1,1432,0,-1,1,-1,-1,-1,-1,-1,2,7,2,-1,0,-1,-1,-1,1\n",
    "swf": SWF,
    "sacct": "JobID|User|JobName|Partition|Submit|Start|End|State|AllocTRES\n"
    "5|ann|train|gpu|2025-04-28T05:39:00|2025-04-28T05:40:00|2025-04-28T06:40:00|COMPLETED|"
    "billing=4,cpu=16,gres/gpu:p100=2,gres/gpu=2,mem=8G\n"
    "6|ann|x|gpu|2025-04-28T05:39:00|Unknown|Unknown|PENDING|\n",
}


def write(folder, kind, text=None):
    path = folder / f"{kind}.csv"
    path.write_text(FILES[kind] if text is None else text)
    return path


@pytest.mark.parametrize("kind", FILES)
def test_each_format_is_known_by_its_beginning(tmp_path, kind):
    path = write(tmp_path, kind)
    assert detect(path) == kind
    trace = read_trace(path)
    assert dict(trace.jobs.schema) == SCHEMA
    assert trace.jobs["submit_s"].is_sorted()
    out = tmp_path / "table.csv"
    trace.jobs.write_csv(out)
    again = read_trace(out)
    assert detect(out) == "table"
    assert again.jobs.to_dicts() == trace.jobs.to_dicts()


def test_what_the_columns_mean(tmp_path):
    def first(kind):
        return read_trace(write(tmp_path, kind)).jobs.to_dicts()[0]

    philly = first("philly")
    assert (philly["gpus"], philly["run_s"], philly["partition"]) == (1, 5.0, "vc2")
    helios = first("helios")
    assert (helios["user"], helios["gpus"], helios["name"]) == ("u1", 2, "train")
    openb = first("openb")
    assert (openb["cpus"], openb["run_s"], openb["wait_s"]) == (7, 80.0, 10.0)
    assert openb["gpu_type"] == "V100M16|V100M32"
    rltune = first("rltune")
    assert (rltune["run_s"], rltune["gpu_type"], rltune["name"]) == (10.0, "MISC", "bert")
    swf = first("swf")
    assert (swf["gpus"], swf["time_limit_s"], swf["name"]) == (128, 3600.0, "7")
    sacct = first("sacct")
    assert (sacct["gpus"], sacct["run_s"], sacct["wait_s"]) == (2, 3600.0, 60.0)
    assert (sacct["gpu_type"], sacct["cpus"]) == ("p100", 16)


@pytest.mark.parametrize(("kind", "left_out"), [("openb", 1), ("swf", 1), ("sacct", 1)])
def test_rows_that_are_no_job_are_counted(tmp_path, kind, left_out):
    assert read_trace(write(tmp_path, kind)).left_out == left_out


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("simple", FILES["simple"] + "8,abc,1,5\n", "row 3: submit_time: 'abc' is no number"),
        ("simple", FILES["simple"] + "8,1,1,-5\n", "row 3: run_s: -5.0 is no run time"),
        ("simple", FILES["simple"] + "8,1,,5\n", "row 3: gpus"),
        ("simple", FILES["simple"] + "8,1,1,5,9,9\n", "no such table"),
        ("philly", FILES["philly"] + "yesterday,1,1,1,v\n", "row 4: timestamp: 'yesterday'"),
        ("swf", SWF + "1 2 3\n", "row 5: has 3 fields"),
        ("swf", SWF.replace("1451", "14x1"), "row 2"),
        ("simple", "", "format is not known"),
        ("simple", "a,b\n1,2\n", "format is not known"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path, kind, text, words):
    path = write(tmp_path, kind, text)
    with pytest.raises(TraceProblem) as told:
        read_trace(path)
    assert words in str(told.value)
    assert str(path) in str(told.value)


def test_files_that_are_not_there_and_formats_that_are_not(tmp_path):
    with pytest.raises(TraceProblem, match="is the path right"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceProblem, match="there are table"):
        read_trace(tmp_path / "absent", "excel")
    for kind in READERS:
        with pytest.raises(InvalidRequest):
            read_trace(write(tmp_path, "philly", "x\n1\n"), kind)


def test_packaged_clusters():
    sizes = {name: load_cluster(name).gpus for name in packaged()}
    assert sizes == {"alibaba": 254, "chameleon": 8, "helios": 136, "philly": 192}
    assert set(load_cluster("helios").partitions) == {"vc1", "vc2", "vc3", "vc4", "vc5"}


@pytest.mark.parametrize(
    "text",
    ["", "nodes: []", "nodes: [{gpus: 8}]", "nodes: [{gpus: 'P100:8', colour: red}]", "- [",
     "nodes: [{gpus: 'P100:8', memory: lots}]", "nodes: [{count: 0, gpus: 'P100:8'}]"],
)  # fmt: skip
def test_bad_clusters_are_refused(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ClusterProblem, match=r"c\.yaml"):
        load_cluster(str(path))
    with pytest.raises(ClusterProblem, match="philly"):
        load_cluster(str(tmp_path / "absent"))


def test_jobs_of_a_trace_on_a_cluster(tmp_path):
    rows = "".join(f"{i},{i * 100},{gpus},50\n" for i, gpus in enumerate([1, 8, 16, 2]))
    trace = read_trace(write(tmp_path, "simple", "job_id,submit_time,num_gpu,duration\n" + rows))
    cluster = load_cluster("philly")
    jobs = make_jobs(trace, cluster, Options(load=0.5, clairvoyant=True))
    assert [job.spec.nodes for job in jobs] == [1, 1, 0, 1]
    assert offered_load(jobs, cluster) == pytest.approx(0.5)
    assert jobs[0].spec.time_estimate_s == 50.0
    assert [j.job_id for j in make_jobs(trace, cluster, Options(jobs=2, skip=1))] == [2, 3]
    with pytest.raises(InvalidRequest, match="no job is left"):
        make_jobs(trace, cluster, Options(skip=9))
    assert describe(trace)["jobs_by_gpus"] == {"1": 1, "2": 1, "8": 1, "16": 1}


def test_gpu_types_that_the_cluster_lacks_are_not_asked_for(tmp_path):
    trace = read_trace(write(tmp_path, "sacct"))
    assert make_jobs(trace, load_cluster("philly"), Options())[0].spec.gpu_types == ("p100",)
    assert make_jobs(trace, load_cluster("helios"), Options())[0].spec.gpu_types == ()


def test_there_is_a_page_for_every_format():
    text = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    assert [kind for kind in READERS if f"| `{kind}` |" not in text] == []
