"""The operator's file: what it may say, and what is said of mistakes in it."""

import pytest

from controller.errors import Rejected
from controller.partitions import ClusterConfig, ConfigProblem, load_config
from controller.scheduler.feasibility import never_fits
from controller.scheduler.types import ClusterView, GpuSlot, NodeCapacity, Partition
from protos.messages import JobSpec

GOOD = """
partitions:
  - {name: all, nodes: ["*"], default: true, max_gpus_per_user: 4}
  - {name: day, nodes: [gpu-*, lone], allow_users: [ada], max_gpus: 2, max_time: 2h}
gpu_types:
  P100: {speed: 0.5}
  V100: {speed: 0.9, cost: 1.5}
"""


def load(folder, text):
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_config(path)


def spec(user="ada", gpus=1, **fields):
    return JobSpec("j", user, ("true",), "/", gpus=gpus, **fields)


def test_what_a_file_says(tmp_path):
    config = load(tmp_path, GOOD)
    assert config.partitions_of("gpu-7") == {"all", "day"}
    assert config.partitions_of("other") == {"all"}
    assert config.gpu_speed == {"P100": 0.5, "V100": pytest.approx(0.6)}
    limits = config.limits
    assert (limits["day"].max_gpus, limits["day"].max_gpus_per_user) == (2, None)
    assert limits["all"].max_gpus_per_user == 4


def test_admission(tmp_path):
    config = load(tmp_path, GOOD)
    assert config.admit(spec()).partition == "all"
    admitted = config.admit(spec(partition="day"))
    assert (admitted.partition, admitted.time_limit_s) == ("day", 7200.0)
    assert config.admit(spec(partition="day", time_limit_s=60.0)).time_limit_s == 60.0
    for job, code in (
        (spec(partition="night"), "no_partition"),
        (spec("bob", partition="day"), "not_allowed"),
        (spec(partition="day", time_limit_s=7201.0), "time_limit"),
    ):
        with pytest.raises(Rejected) as refused:
            config.admit(job)
        assert refused.value.code == code
        assert refused.value.hint


def test_without_partitions_none_can_be_asked_for():
    assert ClusterConfig().admit(spec()) == spec()
    with pytest.raises(Rejected, match="none is configured"):
        ClusterConfig().admit(spec(partition="all"))


def test_without_a_default_one_must_be_named(tmp_path):
    config = load(tmp_path, "partitions: [{name: a, nodes: [x]}]")
    with pytest.raises(Rejected, match="none is the default") as refused:
        config.admit(spec())
    assert "a" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no keys"),
        ("- 1", "holds no keys"),
        ("a: [", "is not YAML"),
        ("colour: red", "colour: Extra inputs"),
        ("partitions: 5", "partitions: "),
        ("partitions: [{nodes: [x]}]", r"partitions.0.name: Field required"),
        ("partitions: [{name: 'a b', nodes: [x]}]", "partitions.0.name"),
        ("partitions: [{name: a, nodes: []}]", "partitions.0.nodes"),
        ("partitions: [{name: a, nodes: [x], max_time: soon}]", "no duration; write e.g. 90m"),
        ("partitions: [{name: a, nodes: [x], max_gpus: -1}]", "max_gpus"),
        ("partitions: [{name: a, nodes: [x]}, {name: a, nodes: [y]}]", "two partitions 'a'"),
        (
            (
                "partitions: [{name: a, nodes: [x], default: true}, "
                "{name: b, nodes: [y], default: true}]"
            ),
            "only one partition can be the default",
        ),
        ("gpu_types: {P100: {speed: 0}}", "gpu_types.P100.speed"),
        ("gpu_types: {P100: {speed: .inf}}", "gpu_types.P100.speed"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path, text, words):
    with pytest.raises(ConfigProblem, match=words) as told:
        load(tmp_path, text)
    assert "cluster.yaml" in str(told.value)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigProblem, match=str(path)):
            load_config(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigProblem, match="not YAML"):
        load_config(tmp_path / "binary")


def test_a_job_whose_partition_is_gone_can_never_run():
    gpus = (GpuSlot("g", 0, "P100", True, memory_bytes=16),)
    node = NodeCapacity("n", True, gpus, 8, 8, 64, 64, partitions=frozenset("a"))
    view = ClusterView((node,), partitions={"a": Partition("a")})
    assert "no node is in partition b" in never_fits(spec(partition="b"), view)
    assert never_fits(spec(partition="a"), view) is None
