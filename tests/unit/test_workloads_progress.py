"""Progress lines, their pace, and the number of ranks."""

import io
import json
from pathlib import Path

import pytest

from workloads.launch import code_of, ranks_here
from workloads.options import is_rank
from workloads.progress import Pace, Reporter, peak_host_memory_bytes, process_age_s


def test_each_event_is_one_json_line_on_both_places(hostile_dir: Path) -> None:
    stream, file = io.StringIO(), hostile_dir / "new" / "progress"
    reporter = Reporter(file, silent=False, stream=stream)
    reporter.event("progress", step=3, of=9, loss=0.123456789, absent=None)
    reporter.event("summary", name='a "b"\n')
    reporter.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == [
        {"event": "progress", "step": 3, "of": 9, "loss": 0.123457},
        {"event": "summary", "name": 'a "b"\n'},
    ]
    assert file.read_text() == stream.getvalue()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_null(value: float) -> None:
    stream = io.StringIO()
    Reporter(None, silent=False, stream=stream).event("progress", loss=value)
    assert json.loads(stream.getvalue()) == {"event": "progress", "loss": None}


def test_a_requeued_attempt_adds_to_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        reporter = Reporter(tmp_path / "progress", silent=False, stream=io.StringIO())
        reporter.event("progress", step=step)
        reporter.close()
    assert len((tmp_path / "progress").read_text().splitlines()) == 2


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    Reporter(tmp_path / "progress", silent=True, stream=stream).event("progress", step=1)
    assert (stream.getvalue(), list(tmp_path.iterdir())) == ("", [])


def test_a_progress_file_that_cannot_be_written_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    reporter = Reporter(Path("/dev/full"), silent=False, stream=stream)
    reporter.event("progress", step=1)
    reporter.event("progress", step=2)
    reporter.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert capsys.readouterr().err.count("progress file given up") == 1


def test_a_progress_file_in_a_place_that_cannot_be_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    stream = io.StringIO()
    Reporter(tmp_path / "file" / "p", silent=False, stream=stream).event("progress", step=1)
    assert stream.getvalue()
    assert "no progress file" in capsys.readouterr().err


def test_pace_counts_samples_between_two_reports() -> None:
    now = [100.0]
    pace = Pace(2.0, clock=lambda: now[0])
    pace.count(30)
    now[0] = 101.0
    assert not pace.is_due()
    now[0] = 103.0
    assert pace.is_due()
    assert pace.take() == 10
    assert not pace.is_due()
    now[0] = 104.0
    assert pace.take() == 0


def test_age_and_memory_of_this_process_are_plausible() -> None:
    first = process_age_s()
    assert 0 < first <= process_age_s() < 24 * 3600
    assert 10e6 < peak_host_memory_bytes() < 1e12


@pytest.mark.parametrize(
    ("asked", "environ", "ranks"),
    [
        (3, {"PET_NPROC_PER_NODE": "2"}, 3),
        (None, {"PET_NPROC_PER_NODE": "2", "NPROC_PER_NODE": "4"}, 2),
        (None, {"NPROC_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "GPU-a"}, 4),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 2),
        (None, {"PET_NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": ""}, 1),
        (None, {}, 1),
    ],
)
def test_ranks_follow_what_was_asked_then_the_environment(
    asked: int | None, environ: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert ranks_here(asked, environ) == ranks


@pytest.mark.parametrize(("rank_ended", "code"), [(4, 4), (143, 143), (-9, 137), (-11, 139)])
def test_the_end_of_a_rank_gives_the_code_of_the_run(
    rank_ended: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(rank_ended, 1) == code
    assert ("rank 1 was ended by SIG" in capsys.readouterr().err) == (rank_ended < 0)


def test_a_jobs_outer_environment_does_not_make_it_a_rank() -> None:
    outer = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "0"}
    assert not is_rank(outer)
    assert is_rank(outer | {"RANK": "0", "LOCAL_RANK": "0"})
