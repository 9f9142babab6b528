"""Submit -> first instruction of the process on an idle local cluster, and 500 jobs' throughput.

    .venv/bin/python benchmarks/submit_latency.py [--runs 60] [--jobs 500] [--json]

The job is `date +%s%N`, so its output is the time at which a program of the job ran (one exec
after the supervisor's); the start is taken just before the client's RPC. Both read the same
wall clock on the same machine. `sh -c :` beside it is what this machine needs for one spawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from testbed.job_request import JobRequest
from testbed.local import LocalCluster


def latencies_ms(cluster: LocalCluster, runs: int) -> list[float]:
    """Milliseconds from submission to the job's own clock reading, one job at a time."""
    client, found = cluster.client, []
    for _ in range(runs):
        began_ns = time.time_ns()
        job_id = client.submit(JobRequest(argv=("date", "+%s%N"), cwd="/", gpus=1))
        client.wait([job_id], timeout_s=20)
        said = b"".join(piece.data for piece in client.logs(job_id))
        found.append((int(said) - began_ns) / 1e6)
    return found


def throughput_s(cluster: LocalCluster, jobs: int) -> float:
    """Seconds for `jobs` times `true`, one GPU each, from submission until all have ended."""
    client = cluster.client
    began_s = time.monotonic()
    job_ids = client.submit_many([JobRequest(argv=("true",), cwd="/", gpus=1) for _ in range(jobs)])
    ended = client.wait(job_ids, timeout_s=300)
    assert all(job.exit is not None and job.exit.exit_code == 0 for job in ended)
    return time.monotonic() - began_s


def spawn_ms(runs: int) -> list[float]:
    """What one plain spawn of a shell costs here."""
    found = []
    for _ in range(runs):
        began_s = time.perf_counter()
        subprocess.run(["sh", "-c", ":"], check=True)
        found.append((time.perf_counter() - began_s) * 1e3)
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(len(ordered) * 0.95) - 1], 2),
        "min": round(ordered[0], 2),
        "max": round(ordered[-1], 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result: dict[str, object] = {"spawn_ms": spread(spawn_ms(args.runs))}
    for allocator in ("greedy", "milp"):
        with LocalCluster(["P100:4"] * 4, allocator=allocator) as cluster:
            latencies_ms(cluster, 3)
            result[f"submit_to_first_instruction_ms_{allocator}"] = spread(
                latencies_ms(cluster, args.runs)
            )
            result[f"{args.jobs}_jobs_s_{allocator}"] = spread(
                [throughput_s(cluster, args.jobs) for _ in range(args.repeats)]
            )
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for name, numbers in result.items():
            sys.stdout.write(f"{name:45s} {numbers}\n")


if __name__ == "__main__":
    main()
