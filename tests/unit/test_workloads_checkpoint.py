"""Checkpoints: whole or not there, whatever happened while they were written."""

import json
import resource
from pathlib import Path

import pytest
import torch

from workloads.checkpoint import CheckpointError, Folder, Manifest, State

RUN = {"model": "resnet18", "seed": 0}


def _state(step: int) -> State:
    return {"step": step, "model": {"weight": torch.full((1000,), float(step))}}


def _folder(path: Path, *steps: int) -> Folder:
    folder = Folder(path, RUN)
    folder.prepare()
    for step in steps:
        folder.save(_state(step), step, "interval")
    return folder


def _load(folder: Folder) -> tuple[int | None, list[str]]:
    damaged: list[str] = []
    found = folder.load(lambda path, _reason: damaged.append(path.name))
    return (found[0]["step"] if found else None), damaged


def test_the_newest_comes_back_as_it_was(hostile_dir: Path) -> None:
    folder = _folder(hostile_dir / "deeper" / "still", 5, 12)
    found = folder.load(lambda *_: None)
    assert found is not None
    state, manifest = found
    assert torch.equal(state["model"]["weight"], _state(12)["model"]["weight"])
    assert (manifest.step, manifest.reason) == (12, "interval")


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    assert _load(_folder(tmp_path, 9, 10)) == (10, [])


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert _load(_folder(tmp_path)) == (None, [])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    _folder(tmp_path, 1, 2, 3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000000003.json", "step-0000000003.pt",
        "step-0000000004.json", "step-0000000004.pt"]  # fmt: skip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "damage"),
    [(".pt", _cut), (".pt", _flip), (".pt", Path.unlink), (".json", _cut),
     (".json", lambda path: path.write_text("[]")), (".json", lambda path: path.write_text("{}"))],
)  # fmt: skip
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, part: str, damage
) -> None:
    folder = _folder(tmp_path, 1, 2)
    damage(tmp_path / f"step-0000000002{part}")
    assert _load(folder) == (1, ["step-0000000002.pt"])


def test_a_checkpoint_of_another_format_is_not_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 1, 2)
    path = tmp_path / "step-0000000002.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    assert _load(folder) == (1, ["step-0000000002.pt"])


def test_a_damaged_checkpoint_set_aside_is_neither_tried_nor_counted_again(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 1, 9)
    _cut(tmp_path / "step-0000000009.pt")
    folder.set_aside(tmp_path / "step-0000000009.pt")
    folder.save(_state(2), 2, "interval")
    assert _load(folder) == (2, [])
    assert len(folder.manifests()) == 2
    assert (tmp_path / "damaged-step-0000000009.pt").exists()


def test_a_writer_killed_before_the_manifest_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 1)
    (tmp_path / "step-0000000002.pt").write_bytes(b"half of")
    (tmp_path / ".step-0000000002.json.99").write_bytes(b"{")
    assert _load(folder) == (1, [])
    folder.prepare()
    assert not (tmp_path / ".step-0000000002.json.99").exists()


def test_another_runs_checkpoint_is_refused_with_both_names(tmp_path: Path) -> None:
    _folder(tmp_path, 1)
    other = Folder(tmp_path, {"model": "vgg16", "seed": 0})
    with pytest.raises(CheckpointError, match=r"resnet18.*vgg16"):
        other.load(lambda *_: None)


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be kept"):
        Folder(tmp_path / "file", RUN).prepare()


def test_a_write_that_the_system_refuses_leaves_the_older_ones(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 1, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))  # as a full disk: writes fail half-way
    try:
        with pytest.raises(CheckpointError, match="step 3 not saved"):
            folder.save(_state(3), 3, "interval")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _load(folder) == (2, [])


def test_the_manifest_tells_why_and_how_big(tmp_path: Path) -> None:
    path = _folder(tmp_path).save(_state(7), 7, "sigterm")
    manifest = Manifest.read(path.with_suffix(".json"))
    assert (manifest.step, manifest.reason, manifest.run) == (7, "sigterm", RUN)
    assert manifest.bytes == path.stat().st_size
