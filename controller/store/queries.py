"""Every SQL statement of the store, by name. Values are always bound, never pasted in."""

from __future__ import annotations

UPSERT_JOB = """
INSERT INTO jobs (
    job_id, request_id, user, name, state, spec, submitted_at_s, eligible_at_s, started_at_s,
    ended_at_s, attempt, restarts, cancel, exit, exit_node_rank, reason, reason_text,
    failed_launches, not_before_s
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (job_id) DO UPDATE SET
    state = excluded.state, eligible_at_s = excluded.eligible_at_s,
    started_at_s = excluded.started_at_s, ended_at_s = excluded.ended_at_s,
    attempt = excluded.attempt, restarts = excluded.restarts, cancel = excluded.cancel,
    exit = excluded.exit, exit_node_rank = excluded.exit_node_rank, reason = excluded.reason,
    reason_text = excluded.reason_text, failed_launches = excluded.failed_launches,
    not_before_s = excluded.not_before_s
"""

UPSERT_ATTEMPT = """
INSERT INTO attempts (
    job_id, attempt, state, created_at_s, started_at_s, ended_at_s, stop_reason, fenced,
    node_failure, exit, exit_node_rank, master_port, terms, why,
    gpu_utilization_mean_pct, gpu_memory_peak_bytes, gpu_sampled_s
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (job_id, attempt) DO UPDATE SET
    state = excluded.state, started_at_s = excluded.started_at_s,
    ended_at_s = excluded.ended_at_s, stop_reason = excluded.stop_reason,
    fenced = excluded.fenced, node_failure = excluded.node_failure, exit = excluded.exit,
    exit_node_rank = excluded.exit_node_rank,
    gpu_utilization_mean_pct = excluded.gpu_utilization_mean_pct,
    gpu_memory_peak_bytes = excluded.gpu_memory_peak_bytes,
    gpu_sampled_s = excluded.gpu_sampled_s
"""

UPSERT_RANK = """
INSERT INTO ranks (
    job_id, attempt, node_rank, node, gpu_uuids, gpu_indices, phase, pid, exit, usage,
    released_at_s
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (job_id, attempt, node_rank) DO UPDATE SET
    phase = excluded.phase, pid = excluded.pid, exit = excluded.exit, usage = excluded.usage,
    released_at_s = excluded.released_at_s
"""

UPSERT_LEASE = """
INSERT INTO gpu_leases (
    job_id, attempt, node_rank, node, gpu_uuid, leased_at_s, released_at_s
) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (job_id, attempt, node_rank, gpu_uuid) DO UPDATE SET
    released_at_s = excluded.released_at_s
"""

UPSERT_NODE = """
INSERT INTO nodes (
    name, node_id, boot_id, instance_id, address, facts, admin, admin_reason, admin_actor, lease,
    health, faults, launch_fault_jobs, lost_at_s
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET
    node_id = excluded.node_id, boot_id = excluded.boot_id, instance_id = excluded.instance_id,
    address = excluded.address, facts = excluded.facts, admin = excluded.admin,
    admin_reason = excluded.admin_reason, admin_actor = excluded.admin_actor,
    lease = excluded.lease, health = excluded.health, faults = excluded.faults,
    launch_fault_jobs = excluded.launch_fault_jobs, lost_at_s = excluded.lost_at_s
"""

DELETE_GPUS = "DELETE FROM gpus WHERE node = ?"

INSERT_GPU = """
INSERT INTO gpus (node, gpu_uuid, position, facts, health, faults) VALUES (?, ?, ?, ?, ?, ?)
"""

INSERT_EVENT = """
INSERT INTO events (event_id, at_s, kind, job_id, attempt, node, actor, text, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

# Jobs that matter to the present: not final, or with a process or GPU not yet given back.
LIVE_JOBS = """
SELECT * FROM jobs
WHERE state IN ('PENDING', 'HELD', 'STARTING', 'RUNNING')
   OR job_id IN (SELECT job_id FROM ranks WHERE released_at_s IS NULL)
"""

JOBS_BY_ID = "SELECT * FROM jobs WHERE job_id IN (SELECT value FROM json_each(?))"

ATTEMPTS_BY_JOB = """
SELECT * FROM attempts WHERE job_id IN (SELECT value FROM json_each(?)) ORDER BY job_id, attempt
"""

RANKS_BY_JOB = """
SELECT * FROM ranks WHERE job_id IN (SELECT value FROM json_each(?))
ORDER BY job_id, attempt, node_rank
"""

ALL_NODES = "SELECT * FROM nodes ORDER BY name"

ALL_GPUS = "SELECT * FROM gpus ORDER BY node, position"

CLUSTER_ID = "SELECT cluster_id FROM cluster"

LAST_JOB_ID = "SELECT COALESCE(MAX(job_id), 0) FROM jobs"

LAST_EVENT_ID = "SELECT COALESCE(MAX(event_id), 0) FROM events"

JOB_BY_REQUEST = "SELECT job_id FROM jobs WHERE user = ? AND request_id = ?"

# The newest jobs that pass every filter that is not NULL.
FILTERED_JOBS = """
SELECT * FROM jobs
WHERE (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
  AND (:ids IS NULL OR job_id IN (SELECT value FROM json_each(:ids)))
  AND (:user IS NULL OR user = :user)
  AND (:name IS NULL OR name = :name)
  AND (:before_id IS NULL OR job_id < :before_id)
ORDER BY job_id DESC LIMIT :limit
"""

JOBS_BY_STATE = "SELECT state, COUNT(*) FROM jobs GROUP BY state"

EVENTS_AFTER = """
SELECT * FROM events
WHERE event_id > :after
  AND event_id <= :up_to
  AND (:job_ids IS NULL OR job_id IN (SELECT value FROM json_each(:job_ids)))
  AND (:node IS NULL OR node = :node)
ORDER BY event_id LIMIT :limit
"""

LAST_EVENTS = """
SELECT * FROM events WHERE job_id IN (SELECT value FROM json_each(?))
ORDER BY event_id DESC LIMIT ?
"""

# GPU-seconds that attempts of a user took; those still running are counted elsewhere.
ENDED_USAGE = """
SELECT jobs.user, attempts.ended_at_s,
       (attempts.ended_at_s - attempts.started_at_s)
       * (SELECT COUNT(*) FROM gpu_leases AS lease
          WHERE lease.job_id = attempts.job_id AND lease.attempt = attempts.attempt)
FROM attempts JOIN jobs USING (job_id)
WHERE attempts.state = 'ENDED' AND attempts.started_at_s IS NOT NULL
  AND attempts.ended_at_s > ?
"""

# The newest jobs that ended by themselves (or at their limit), for predictions.
ENDED_RUNS = """
SELECT spec, ended_at_s - started_at_s FROM jobs
WHERE state IN ('COMPLETED', 'FAILED', 'OUT_OF_MEMORY', 'TIMEOUT') AND started_at_s IS NOT NULL
ORDER BY ended_at_s DESC, job_id DESC LIMIT ?
"""
