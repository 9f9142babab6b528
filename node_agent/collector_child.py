"""The collector's process: `python -m node_agent.collector_child`, NVML behind a pair of pipes.

One JSON request a line on stdin, one JSON answer a line on stdout, in order:

    {"id": 1, "op": "scan"}                          -> {"id": 1, "scan": {...}}
    {"id": 2, "op": "processes", "uuids": ["GPU-"]}  -> {"id": 2, "processes": {...}}

Id 0 is the greeting that says that requests are read. A greeting instead of an answer means that
the process began anew and that the request must be repeated. The process ends with its stdin,
also when NVML hangs: its parent is gone then.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from node_agent.mock_nvml import MockNvml, parse_mock_gpus
from node_agent.nvml import DRIVER_VERSION_PATH, NvmlCollector
from node_agent.nvml_api import why_not_nvidia_ml_py
from node_agent.scan import processes_to_json, scan_to_json

READY = {"id": 0}
_ORPHAN_GRACE_S = 2.0


def main() -> int:
    """Serves requests until stdin ends; returns the exit code."""
    args = _parse_args()
    answers = _take_over_stdout()
    requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    is_over = threading.Event()
    threading.Thread(target=_read_requests, args=(requests, is_over), daemon=True).start()
    try:
        collector = _make_collector(args)
    except ValueError as error:
        sys.stderr.write(f"collector: {error}\n")
        return 2
    try:
        _serve(collector, requests, answers, driver=_driver_text())
    except BrokenPipeError:
        return 0
    finally:
        collector.close()
        is_over.set()
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node_agent.collector_child")
    parser.add_argument("--mock", metavar="GPUS", help="mock GPUs, e.g. P100:4,T4:2")
    parser.add_argument("--seed", default="", help="makes the mock UUIDs this agent's own")
    parser.add_argument("--faults", type=Path, metavar="FILE", help="faults of the mock GPUs")
    return parser.parse_args()


def _take_over_stdout() -> int:
    """Keeps the pipe for answers alone: whatever else prints goes to stderr from here on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _make_collector(args: argparse.Namespace) -> NvmlCollector:
    if args.mock is not None:
        mock = MockNvml(
            parse_mock_gpus(args.mock),
            args.seed,
            monotonic=time.monotonic,
            sleep=time.sleep,  # noqa: TID251 - this is the process that passes the real one
            faults_path=args.faults,
        )
        return NvmlCollector(mock, mock=True, problems=mock.problems)
    problem = why_not_nvidia_ml_py(pynvml)
    problems = () if problem is None else (problem,)
    return NvmlCollector(pynvml, problems=lambda: problems)


def _read_requests(
    requests: queue.SimpleQueue[dict[str, Any] | None], is_over: threading.Event
) -> None:
    """Feeds the queue; ends the process when stdin has ended and NVML does not come back."""
    rest = b""
    # Not sys.stdin: its lock, held by a waiting thread, aborts the interpreter's exit.
    while chunk := os.read(0, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            requests.put(json.loads(line))
    requests.put(None)
    if not is_over.wait(_ORPHAN_GRACE_S):
        os._exit(1)


def _serve(
    collector: NvmlCollector,
    requests: queue.SimpleQueue[dict[str, Any] | None],
    answers: int,
    driver: str | None,
) -> None:
    _send(answers, READY)
    operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "scan": lambda _: {"scan": scan_to_json(collector.scan())},
        "processes": lambda request: {
            "processes": processes_to_json(collector.processes(request["uuids"]))
        },
    }
    while True:
        request = requests.get()
        if request is None:
            return
        if _driver_text() != driver:
            # Another driver was loaded: only a fresh process loads the library that goes with it.
            collector.close()
            os.dup2(answers, 1)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
        _send(answers, {"id": request["id"], **operations[request["op"]](request)})


def _send(answers: int, message: dict[str, Any]) -> None:
    data = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    while data:
        data = data[os.write(answers, data) :]


def _driver_text() -> str | None:
    try:
        return DRIVER_VERSION_PATH.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
