"""A controller with a solver that cannot be loaded, as a real process."""

import os
import subprocess
import sys

import pytest


def start(tmp_path, *options, gone):
    """Runs a controller for which these packages cannot be imported; it must end by itself."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for package in gone:
        (folder / f"{package}.py").write_text(f"raise ImportError('{package} is broken')\n")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "controller", "--listen", "127.0.0.1:0", *options],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("name", "package"), [("glpk", "swiglpk"), ("highs", "highspy")])
def test_a_solver_asked_for_by_name_must_be_there(tmp_path, name, package):
    done = start(tmp_path, "--state-dir", str(tmp_path / "s"), "--solver", name, gone=[package])
    assert done.returncode == 2
    assert f"pip install {package} ({package} is broken)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s" / "controller.json").exists()


def test_auto_goes_on_to_glpsol_and_says_so(tmp_path):
    # A state folder that cannot be made ends it once the solver is chosen.
    (tmp_path / "file").touch()
    state = str(tmp_path / "file" / "s")
    done = start(tmp_path, "--state-dir", state, gone=["swiglpk"])
    assert done.returncode == 2
    assert "placements are solved by glpsol" in done.stderr
    assert "swiglpk is broken" in done.stderr


def test_an_unknown_solver_is_refused_with_those_that_exist(tmp_path):
    done = start(tmp_path, "--solver", "cplex", gone=[])
    assert done.returncode == 2
    assert "glpsol" in done.stderr
    assert "Traceback" not in done.stderr
