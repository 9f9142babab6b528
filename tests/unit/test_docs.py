"""The documentation is true: links resolve, and the commands it shows exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")
COMMAND = re.compile(r"^(?:\$ )?rltune ([a-z]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_commands_that_are_shown_exist() -> None:
    shown = {name for page in PAGES for name in COMMAND.findall(page.read_text())}
    assert {"submit", "jobs", "up", "explain"} <= shown
    done = subprocess.run(
        [Path(sys.prefix) / "bin" / "rltune", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    known = set(re.findall(r"^│ ([a-z]+) ", done.stdout, re.MULTILINE))
    assert shown <= known | {"ls", "list", "ps", "show", "stop", "top"}


def test_the_two_commands_of_the_readme_are_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
