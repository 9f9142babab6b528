"""Checkpoints that survive being killed while they are written.

A folder holds, for each kept step N::

    step-0000000120.pt      what torch.load(..., weights_only=True) reads
    step-0000000120.json    the manifest: step, size, CRC-32, reason, and whose run it is

Both are written aside, flushed to the disk and renamed, the manifest last: a checkpoint without a
manifest does not exist. The last two are kept, so that one bad file never costs the whole run.
"""

import json
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeAlias, cast

import torch

FORMAT = 1
KEPT = 2
_CHUNK = 1 << 20

State: TypeAlias = dict[str, Any]


class CheckpointError(Exception):
    """The folder cannot be used, or holds another run's checkpoints."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a checkpoint without reading it."""

    format: int
    step: int
    reason: str
    """``interval``, ``sigterm`` or ``final``."""
    bytes: int
    crc32: int
    run: dict[str, Any]
    """Whose it is: model, task, dataset, scale, seed."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError when it is torn or of another format."""
        try:
            manifest = cls(**json.loads(path.read_bytes()))
        except TypeError as error:
            raise ValueError(str(error)) from error
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, this program reads {FORMAT}")
        return manifest


class _Summed:
    """A file that keeps size and CRC-32 of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc32 = 0
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        written = self._file.write(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()


class Folder:
    """The checkpoints of one run. Only the first rank may save."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self._run = run

    def prepare(self) -> None:
        """Make the folder and clear what a killed writer left.

        Raises:
            CheckpointError: it cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
            for left in self.path.glob(".step-*"):
                left.unlink()
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be kept: {error}") from error

    def save(self, state: State, step: int, reason: str) -> Path:
        """Write a checkpoint; returns its path once it is on the disk.

        Raises:
            CheckpointError: the disk refused (the older checkpoints are untouched).
        """
        name = f"step-{step:010d}"
        final = self.path / f"{name}.pt"
        try:
            aside = self.path / f".{name}.pt.{os.getpid()}"
            with aside.open("wb") as file:
                summed = _Summed(file)
                torch.save(state, cast("IO[bytes]", summed))
                _flush(file)
            aside.rename(final)
            manifest = Manifest(FORMAT, step, reason, summed.bytes, summed.crc32, self._run)
            aside = self.path / f".{name}.json.{os.getpid()}"
            with aside.open("wb") as file:
                file.write(json.dumps(asdict(manifest)).encode())
                _flush(file)
            aside.rename(final.with_suffix(".json"))
            self._flush_names()
            self._drop_old()
        except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
            raise CheckpointError(f"checkpoint of step {step} not saved: {error}") from error
        return final

    def load(self, on_damage: Callable[[Path, str], None]) -> tuple[State, Manifest] | None:
        """The newest checkpoint that is whole, on the CPU; None when there is none.

        Args:
            on_damage: Told of each newer checkpoint that could not be used, and why.

        Raises:
            CheckpointError: the newest whole checkpoint is another run's.
        """
        for path in self.manifests():
            try:
                manifest = Manifest.read(path)
                state = _read(path.with_suffix(".pt"), manifest)
            except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                on_damage(path.with_suffix(".pt"), str(error).partition("\n")[0])
                continue
            if manifest.run != self._run:
                raise CheckpointError(
                    f"{path.parent} holds checkpoints of another run ({_told(manifest.run)}), "
                    f"this one is {_told(self._run)}: give another --checkpoint-dir"
                )
            return state, manifest
        return None

    def manifests(self) -> list[Path]:
        """Paths of the manifests, newest step first."""
        return sorted(self.path.glob("step-*.json"), reverse=True)

    def set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint, so that it is neither tried again nor counted as kept."""
        for part in (path.with_suffix(".json"), path):
            if part.exists():
                part.rename(part.with_name(f"damaged-{part.name}"))

    def _drop_old(self) -> None:
        for path in self.manifests()[KEPT:]:
            # The manifest goes first: without it the other file counts for nothing.
            path.unlink()
            path.with_suffix(".pt").unlink(missing_ok=True)

    def _flush_names(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read(path: Path, manifest: Manifest) -> State:
    size = path.stat().st_size
    if size != manifest.bytes:
        raise ValueError(f"{size} bytes instead of {manifest.bytes}")
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    if crc32 != manifest.crc32:
        raise ValueError("its checksum is wrong")
    state: State = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _told(run: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in run.items())
