"""The node's GPUs as last seen, for an agent that starts while NVML does not answer.

Without it such an agent would say that the node has no GPU, and the controller would end what
runs on them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from node_agent.scan import gpu_facts_from_json
from protos.messages import GpuFacts

log = logging.getLogger("rltune.agent")


class Inventory:
    """`STATE/gpus.json`; it counts only for the boot in which it was written."""

    def __init__(self, state_dir: Path, boot_id: str) -> None:
        self._path = state_dir / "gpus.json"
        self._boot_id = boot_id

    def read(self) -> tuple[GpuFacts, ...]:
        """The GPUs that an earlier agent saw in this boot; empty when that is not known."""
        try:
            document = json.loads(self._path.read_text(encoding="ascii"))
            gpus = tuple(gpu_facts_from_json(gpu) for gpu in document["gpus"])
        except (OSError, ValueError, KeyError, TypeError):  # not there, or of another version
            return ()
        return gpus if document.get("boot_id") == self._boot_id else ()

    def write(self, gpus: tuple[GpuFacts, ...]) -> None:
        """Remembers the GPUs. A disk that refuses it is told by `state_folder_health`."""
        fresh = self._path.with_suffix(".new")
        document = {"boot_id": self._boot_id, "gpus": [asdict(gpu) for gpu in gpus]}
        try:
            fresh.write_text(json.dumps(document), encoding="ascii")
            fresh.replace(self._path)
        except OSError as error:
            log.warning("the list of GPUs cannot be stored: %s", error)
