"""Submissions before they are complete: defaults, precedence, job files, settings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from protos.codec import check_job_spec
from protos.messages import OnNodeFail
from testbed.client_errors import InvalidRequest
from testbed.job_request import JobRequest, os_user
from testbed.jobfile import KEYS, JobFileProblem, load_job_file
from testbed.settings import BadSettings, check_address, config_path, is_local, load_settings


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------ requests


def test_defaults_are_filled_in_once():
    spec = JobRequest(argv=("/usr/bin/python3", "train.py"), gpus=4, nodes=2).to_spec(user="ann")
    check_job_spec(spec)
    assert (spec.name, spec.user, spec.cpus, spec.cwd) == ("python3", "ann", 2, str(Path.cwd()))
    assert (spec.time_limit_s, spec.qos, spec.on_node_fail) == (None, "normal", OnNodeFail.REQUEUE)
    assert spec.env == {}


def test_a_named_workload_becomes_a_command_that_a_users_folder_cannot_shadow():
    spec = JobRequest(workload="ResNet-50", workload_options=("--steps", "5")).to_spec(user="ann")
    assert spec.name == "resnet50"
    assert spec.argv[-4:] == ("workloads.train", "resnet50", "--steps", "5")
    assert spec.env == {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (JobRequest(workload="resnet51"), "resnet5"),
        (JobRequest(workload="resnet50", workload_options=("--stepz", "5")), "--stepz"),
        (JobRequest(workload="train.py"), "train.py"),
        (JobRequest(), "nothing to run"),
        (JobRequest(argv=()), "nothing to run"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_sent(request_, part):
    with pytest.raises(InvalidRequest) as refused:
        request_.to_spec(user="ann")
    assert part in refused.value.message
    assert refused.value.hint


def test_flags_win_over_a_file_and_environments_are_joined():
    file = JobRequest(workload="resnet50", workload_options=("--steps", "5"), gpus=2,
                      time_limit_s=60.0, env={"A": "1", "B": "1"})  # fmt: skip
    flags = JobRequest(gpus=0, time_limit_s=math.inf, env={"B": "2"})
    merged = file.overridden_by(flags)
    assert merged.gpus == 0
    assert merged.env == {"A": "1", "B": "2"}
    assert merged.workload == "resnet50"
    assert merged.to_spec(user="ann").time_limit_s is None


def test_another_program_replaces_the_whole_program():
    file = JobRequest(workload="resnet50", workload_options=("--steps", "5"), gpus=2)
    merged = file.overridden_by(JobRequest(argv=("true",)))
    assert merged.to_spec(user="ann").argv == ("true",)
    assert merged.gpus == 2


def test_a_programs_odd_name_makes_a_name_that_is_taken():
    spec = JobRequest(argv=("/tmp/" + "x\n\x1b" * 100,)).to_spec(user="ann")
    check_job_spec(spec)


def test_the_user_is_the_systems_whatever_the_environment_says(monkeypatch):
    before = os_user()
    monkeypatch.setenv("USER", "mallory")
    monkeypatch.setenv("LOGNAME", "mallory")
    assert os_user() == before


# ------------------------------------------------------------------ job files

YAML = """\
# a comment
name: night run
workload: resnet50
args: --steps 20 --batch-size 32
gpus: p100:2
nodes: 2
mem: 32G
time: 12:00:00
estimate: 2h
grace: 10s
env:
  A: no
  B: 1e3
  C: ""
hold: yes
on_node_fail: wait
count: 3
"""


def test_a_yaml_file_means_what_it_says(tmp_path):
    file = load_job_file(write(tmp_path, "job.yaml", YAML))
    spec = file.request.to_spec(user="ann")
    assert file.count == 3
    assert spec.name == "night run"
    assert spec.argv[-5:] == ("resnet50", "--steps", "20", "--batch-size", "32")
    assert (spec.gpus, spec.gpu_types, spec.nodes) == (2, ("p100",), 2)
    assert (spec.memory_bytes, spec.time_limit_s) == (32 * 2**30, 43_200)
    assert {name: spec.env[name] for name in "ABC"} == {"A": "no", "B": "1e3", "C": ""}
    assert (spec.hold, spec.on_node_fail, spec.grace_s) == (True, OnNodeFail.WAIT, 10)


def test_a_toml_file_means_the_same(tmp_path):
    text = """
command = ["python", "train.py"]
gpus = 2
gpu_type = ["v100", "p100"]
time = 02:30:00
hold = true
[env]
N = 4
"""
    spec = load_job_file(write(tmp_path, "job.toml", text)).request.to_spec(user="ann")
    assert spec.argv == ("python", "train.py")
    assert (spec.gpus, spec.gpu_types, spec.time_limit_s) == (2, ("v100", "p100"), 9000)
    assert spec.env == {"N": "4"}


def test_a_command_on_one_line_is_split_as_a_shell_would(tmp_path):
    path = write(tmp_path, "job.yml", "command: sh -c 'echo \"a b\"'\n")
    assert load_job_file(path).request.argv == ("sh", "-c", 'echo "a b"')


def test_a_relative_folder_counts_from_the_file(hostile_dir):
    path = write(hostile_dir, "job.yaml", "command: pwd\ncwd: sub\n")
    assert load_job_file(path).request.cwd == str(hostile_dir / "sub")


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("j.yaml", "command: x\ngpuz: 2\n", ["line 2", "'gpuz'", "'gpus'"]),
        ("j.toml", 'command = "x"\n\ngpuz = 2\n', ["line 3", "'gpuz'", "'gpus'"]),
        ("j.yaml", "command: x\ntime: 90\n", ["line 2", "time", "90s or 90m"]),
        ("j.yaml", "command: x\ngpus: many\n", ["line 2", "gpus", "many"]),
        ("j.yaml", "command: x\ncpus: 1.5\n", ["line 2: cpus: '1.5' is not a whole number"]),
        ("j.yaml", "command: x\ncpus: [1]\n", ["line 2: cpus: ['1'] is not a whole number"]),
        ("j.yaml", "command: x\ncpus: " + "9" * 5000, ["line 2: cpus: ", "whole number"]),
        ("j.yaml", "command: x\nenv: [1]\n", ["line 2: env: ['1'] is not a table"]),
        ("j.yaml", "command: x\nenv:\n  A: [1]\n", ["line 3: env.A: ['1'] is not a text"]),
        ("j.yaml", "command: x\nenv:\n  A:\n", ["line 3: env.A: ", "is not a text"]),
        ("j.yaml", "command: x\nname: [1]\n", ["line 2: name: ['1'] is not a text"]),
        ("j.yaml", "command: {a: b}\n", ["line 1: command: {'a': 'b'} is neither"]),
        ("j.yaml", "command: [x, [y]]\n", ["line 1: command.1: ['y'] is not a text"]),
        (
            "j.yaml",
            "command: x\ngpus: [1]\n",
            ["line 2: gpus: ['1'] cannot be meant; write e.g. 4 or p100:4"],
        ),
        ("j.yaml", "command: x\ngpu_type: {a: b}\n", ["line 2: gpu_type: ", "is neither"]),
        (
            "j.yaml",
            "command: x\ntime: [1]\n",
            ["line 2: time: ['1'] cannot be meant; write e.g. 2h30m"],
        ),
        (
            "j.yaml",
            "command: x\nmem: [1]\n",
            ["line 2: mem: ['1'] cannot be meant; write e.g. 32G"],
        ),
        ("j.yaml", "command: x\nhold: perhaps\n", ["hold: 'perhaps' is neither true nor false"]),
        ("j.yaml", "command: x\nqos: urgent\n", ["line 2: qos: 'urgent' is not 'low', 'normal'"]),
        ("j.yaml", "command: x\non_node_fail: [x]\n", ["line 2: on_node_fail: ['x'] is not"]),
        ("j.toml", 'command = "x"\ngpus = true\n', ["line 2: gpus: True cannot be meant"]),
        ("j.toml", 'command = "x"\ngpuz = true\n', ["line 2", "'gpus'"]),
        ("j.toml", 'name = "x"\n', ['`command = "python train.py"`', '`workload = "resnet50"`']),
        ("j.toml", "command = '''\ncd x\nmake\n'''\n", ["line 1: command: has several lines"]),
        ("j.yaml", "command: |\n  cd x\n  make\n", ["line 1", "several lines", "sh, -c"]),
        ("j.yaml", "command: !!python/object:os.system x\n", ["line 1", "tag !!python"]),
        ("j.yaml", "command: x\nname: !secret y\n", ["line 2", "tag !secret"]),
        ("j.yaml", "command: x\nenv: !!set {A, B}\n", ["line 2", "tag !!set"]),
        ("j.yaml", "command: x\n!x name: y\n", ["line 2", "tag !x"]),
        ("j.yaml", "command: x\ncount: 999999999\n", ["line 2: count: '999999999' is more than"]),
        ("j.yaml", "command: x\ncommand: y\n", ["line 2", "twice"]),
        ("j.yaml", "command: 'x\n", ["line"]),
        ("j.yaml", "command: x\n\tgpus: 2\n", ["line 2"]),
        ("j.yaml", "gpus: 2\n", ["command", "workload"]),
        ("j.yaml", "command: x\nworkload: resnet50\n", ["either"]),
        ("j.yaml", "command: x\nargs: y\n", ["args"]),
        ("j.yaml", "- x\n", ["no keys"]),
        ("j.yaml", "", ["no keys"]),
        ("j.yaml", "? [a]\n: b\n", ["plain text"]),
        ("j.yaml", 'command: "sh -c \'x"\n', ["command"]),
        ("j.yaml", "command: x\n--- \ncommand: y\n", ["line"]),
        ("j.yaml", "command: x\ncount: 0\n", ["line 2: count: '0' is less than 1"]),
        ("j.json", "{}", [".json", ".yaml or .toml"]),
        ("j.toml", "command = x\n", ["line 1"]),
        ("j.yaml", "a: &a [*a]\n", ["too many"]),
        ("j.yaml", "[" * 3000, ["nested"]),
    ],
)
def test_a_faulty_file_is_refused_with_the_place_and_the_cure(tmp_path, name, text, parts):
    with pytest.raises(JobFileProblem) as refused:
        load_job_file(write(tmp_path, name, text))
    told = str(refused.value)
    assert str(tmp_path) in told
    for part in parts:
        assert part in told
    assert "nput should" not in told


def test_one_line_in_a_block_is_a_command_and_so_are_options_on_several(tmp_path):
    path = write(tmp_path, "j.yaml", "command: |\n  echo hi\n")
    assert load_job_file(path).request.argv == ("echo", "hi")
    path = write(tmp_path, "j.yaml", "workload: resnet50\nargs: |\n  --steps 2\n  --seed 1\n")
    assert load_job_file(path).request.workload_options == ("--steps", "2", "--seed", "1")


def test_a_file_that_stands_for_billions_of_values_is_refused(tmp_path):
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [
        f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]"
        for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    with pytest.raises(JobFileProblem, match="too many"):
        load_job_file(write(tmp_path, "bomb.yaml", "\n".join(lines)))


def test_files_that_are_no_text_or_not_there(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"command: x\nname: caf\xe9\n")
    with pytest.raises(JobFileProblem, match="line 2"):
        load_job_file(latin)
    with pytest.raises(JobFileProblem, match="No such file"):
        load_job_file(tmp_path / "none.yaml")
    with pytest.raises(JobFileProblem, match="directory"):
        load_job_file(tmp_path)


def test_every_key_of_a_job_file_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [key for key in KEYS if f"`{key}`" not in text] == []


# ------------------------------------------------------------------ settings


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "rltune").mkdir()
    return {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/home/ann"}


def settings_file(environ: dict[str, str], text: str) -> Path:
    path = config_path(environ)
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_come_from_the_nearest_place(environ):
    def found(flags: dict[str, str]) -> tuple[str, str]:
        item = load_settings(environ, flags).items[0]
        return item.value, item.origin

    assert found({}) == ("127.0.0.1:7817", "default")
    path = settings_file(environ, '[client]\ncontroller = "filed:1"\n')
    assert found({}) == ("filed:1", str(path))
    environ["RLTUNE_CONTROLLER"] = "named:2"
    assert found({}) == ("named:2", "environment RLTUNE_CONTROLLER")
    assert found({"client.controller": "flagged:3"}) == ("flagged:3", "flag")


def test_the_file_lies_where_xdg_says():
    assert config_path({"HOME": "/h"}) == Path("/h/.config/rltune/config.toml")
    assert config_path({"HOME": "/h", "XDG_CONFIG_HOME": "rel"}).is_relative_to("/h/.config")
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/rltune/config.toml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[client]\ncontroler = "a:1"\n', "client.controller"),
        ('controller = "a:1"\n', "client.controller"),
        ("[client]\ncontroller = 7817\n", "text"),
        ("[client\n", "line 1"),
        ('[client]\ncontroller = "nowhere"\n', "HOST:PORT"),
    ],
)
def test_a_faulty_settings_file_is_refused_with_the_cure(environ, text, part):
    settings_file(environ, text)
    with pytest.raises(BadSettings) as refused:
        load_settings(environ, {})
    assert part in str(refused.value)


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:7817", "a-b.c:80"])
def test_addresses(address):
    check_address(address)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "h h:1", "http://h:1", "h:1\n"]
)
def test_what_is_no_address(address):
    with pytest.raises(BadSettings):
        check_address(address)


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True),
     ("10.0.0.1:1", False), ("host:1", False)],
)  # fmt: skip
def test_which_addresses_are_here_for_certain(address, local):
    assert is_local(address) is local
