"""`rltune workloads`: what can be trained by name."""

from __future__ import annotations

import typer

from testbed.cli.json_output import print_json
from testbed.cli.options import JsonFlag
from testbed.cli.text import Column, show_table

COLUMNS = (Column("FAMILY"), Column("READS"), Column("NAMES"))


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("workloads")(workloads)


def workloads(json: JsonFlag = False) -> None:
    """List the workloads that `rltune submit` knows by name, by family."""
    from workloads import catalogue  # noqa: PLC0415 - loads argparse

    found = [catalogue.find(name) for name in catalogue.names()]
    if json:
        fields = [{"name": w.name, "family": w.family, "kind": w.kind} for w in found]
        print_json({"workloads": fields})
        return
    kinds = {w.family: w.kind for w in found}
    rows = [
        (family, kinds[family], " ".join(names)) for family, names in catalogue.families().items()
    ]
    show_table(COLUMNS, rows)
