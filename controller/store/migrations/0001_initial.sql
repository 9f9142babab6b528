-- The first schema. It repeats the invariants of controller.lifecycle, so that a mistake above is
-- refused here. JSON columns hold values that are only ever read whole.

CREATE TABLE jobs (
    job_id          INTEGER PRIMARY KEY CHECK (job_id > 0),
    request_id      TEXT NOT NULL,              -- made by the client, once per submission
    user            TEXT NOT NULL,
    name            TEXT NOT NULL,
    state           TEXT NOT NULL CHECK (state IN (
                        'PENDING', 'HELD', 'STARTING', 'RUNNING', 'COMPLETED', 'FAILED',
                        'OUT_OF_MEMORY', 'TIMEOUT', 'CANCELLED', 'NODE_FAIL')),
    spec            TEXT NOT NULL CHECK (json_valid(spec)),
    submitted_at_s  REAL NOT NULL,              -- all *_at_s: UTC seconds since the epoch
    eligible_at_s   REAL,
    started_at_s    REAL,
    ended_at_s      REAL,
    attempt         INTEGER NOT NULL CHECK (attempt >= 0),
    restarts        INTEGER NOT NULL CHECK (restarts >= 0),
    cancel          TEXT CHECK (cancel IS NULL OR json_valid(cancel)),
    exit            TEXT CHECK (exit IS NULL OR json_valid(exit)),
    exit_node_rank  INTEGER,
    reason          TEXT NOT NULL,
    reason_text     TEXT NOT NULL,
    failed_launches TEXT NOT NULL CHECK (json_valid(failed_launches)),
    not_before_s    REAL NOT NULL,
    -- final states, and only they, have an end
    CHECK ((state IN ('PENDING', 'HELD', 'STARTING', 'RUNNING')) = (ended_at_s IS NULL))
) STRICT;

CREATE UNIQUE INDEX jobs_by_request ON jobs (user, request_id);
CREATE INDEX jobs_by_state ON jobs (state, job_id);
CREATE INDEX jobs_by_user ON jobs (user, job_id);

CREATE TRIGGER final_is_final BEFORE UPDATE OF state ON jobs
WHEN OLD.state IN ('COMPLETED', 'FAILED', 'OUT_OF_MEMORY', 'TIMEOUT', 'CANCELLED', 'NODE_FAIL')
     AND NEW.state NOT IN (OLD.state, 'PENDING')
BEGIN
    SELECT RAISE(ABORT, 'a final job state is overwritten');
END;

CREATE TABLE attempts (
    job_id          INTEGER NOT NULL REFERENCES jobs (job_id),
    attempt         INTEGER NOT NULL CHECK (attempt > 0),
    state           TEXT NOT NULL CHECK (state IN ('LAUNCHING', 'RUNNING', 'LOST', 'ENDED')),
    created_at_s    REAL NOT NULL,
    started_at_s    REAL,
    ended_at_s      REAL,
    stop_reason     TEXT,
    fenced          INTEGER NOT NULL CHECK (fenced IN (0, 1)),
    node_failure    TEXT NOT NULL,
    exit            TEXT CHECK (exit IS NULL OR json_valid(exit)),
    exit_node_rank  INTEGER,
    master_port     INTEGER NOT NULL,
    terms           TEXT NOT NULL CHECK (json_valid(terms)),
    why             TEXT NOT NULL CHECK (json_valid(why)),
    gpu_utilization_mean_pct REAL,
    gpu_memory_peak_bytes    INTEGER,
    gpu_sampled_s   REAL NOT NULL,
    PRIMARY KEY (job_id, attempt),
    CHECK ((state = 'ENDED') = (ended_at_s IS NOT NULL))
) STRICT, WITHOUT ROWID;

-- At most one attempt of a job can still decide about it.
CREATE UNIQUE INDEX attempts_one_live ON attempts (job_id) WHERE state <> 'ENDED' AND fenced = 0;

CREATE TABLE ranks (
    job_id          INTEGER NOT NULL,
    attempt         INTEGER NOT NULL,
    node_rank       INTEGER NOT NULL CHECK (node_rank >= 0),
    node            TEXT NOT NULL,
    gpu_uuids       TEXT NOT NULL CHECK (json_valid(gpu_uuids)),
    gpu_indices     TEXT NOT NULL CHECK (json_valid(gpu_indices)),
    phase           TEXT NOT NULL CHECK (phase IN ('LAUNCHING', 'RUNNING', 'ENDED', 'RELEASED')),
    pid             INTEGER,
    exit            TEXT CHECK (exit IS NULL OR json_valid(exit)),
    usage           TEXT CHECK (usage IS NULL OR json_valid(usage)),
    released_at_s   REAL,
    PRIMARY KEY (job_id, attempt, node_rank),
    FOREIGN KEY (job_id, attempt) REFERENCES attempts (job_id, attempt),
    CHECK ((phase = 'RELEASED') = (released_at_s IS NOT NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX ranks_held ON ranks (node) WHERE released_at_s IS NULL;

CREATE TABLE gpu_leases (
    job_id          INTEGER NOT NULL,
    attempt         INTEGER NOT NULL,
    node_rank       INTEGER NOT NULL,
    node            TEXT NOT NULL,
    gpu_uuid        TEXT NOT NULL,
    leased_at_s     REAL NOT NULL,
    released_at_s   REAL,
    PRIMARY KEY (job_id, attempt, node_rank, gpu_uuid),
    FOREIGN KEY (job_id, attempt, node_rank) REFERENCES ranks (job_id, attempt, node_rank)
) STRICT, WITHOUT ROWID;

-- The guard of guards: a GPU is never given to two attempts at once, whatever the code does.
CREATE UNIQUE INDEX gpu_leased_once ON gpu_leases (node, gpu_uuid) WHERE released_at_s IS NULL;

CREATE TABLE nodes (
    name            TEXT PRIMARY KEY,
    node_id         TEXT NOT NULL,
    boot_id         TEXT NOT NULL,
    instance_id     TEXT NOT NULL,
    address         TEXT NOT NULL,
    facts           TEXT NOT NULL CHECK (json_valid(facts)),    -- without its GPUs
    admin           TEXT NOT NULL CHECK (admin IN ('ACTIVE', 'DRAIN')),
    admin_reason    TEXT NOT NULL,
    admin_actor     TEXT NOT NULL,
    lease           TEXT NOT NULL CHECK (lease IN ('CONNECTED', 'LOST')),
    health          TEXT NOT NULL CHECK (json_valid(health)),
    faults          TEXT NOT NULL CHECK (json_valid(faults)),
    launch_fault_jobs TEXT NOT NULL CHECK (json_valid(launch_fault_jobs)),
    lost_at_s       TEXT NOT NULL CHECK (json_valid(lost_at_s))
) STRICT, WITHOUT ROWID;

CREATE TABLE gpus (
    node            TEXT NOT NULL REFERENCES nodes (name),
    gpu_uuid        TEXT NOT NULL,
    position        INTEGER NOT NULL,           -- order in the node's own list
    facts           TEXT NOT NULL CHECK (json_valid(facts)),
    health          TEXT NOT NULL CHECK (json_valid(health)),
    faults          TEXT NOT NULL CHECK (json_valid(faults)),
    PRIMARY KEY (node, gpu_uuid)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    event_id        INTEGER PRIMARY KEY,
    at_s            REAL NOT NULL,
    kind            TEXT NOT NULL,
    job_id          INTEGER,
    attempt         INTEGER,
    node            TEXT,
    actor           TEXT NOT NULL,
    text            TEXT NOT NULL,
    data            TEXT NOT NULL CHECK (json_valid(data))
) STRICT;

CREATE INDEX events_by_job ON events (job_id, event_id) WHERE job_id IS NOT NULL;

CREATE TRIGGER events_are_not_changed BEFORE UPDATE ON events
BEGIN
    SELECT RAISE(ABORT, 'the event log is append-only');
END;

CREATE TRIGGER events_are_not_deleted BEFORE DELETE ON events
BEGIN
    SELECT RAISE(ABORT, 'the event log is append-only');
END;
