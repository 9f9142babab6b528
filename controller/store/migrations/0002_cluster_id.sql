-- Who this cluster is. Job numbers begin at 1 in every cluster, so agents must not take orders of
-- one whose database is another, even if it listens at the same address.

CREATE TABLE cluster (
    only_row   INTEGER PRIMARY KEY CHECK (only_row = 1),
    cluster_id TEXT NOT NULL CHECK (length(cluster_id) = 32)
) STRICT;

INSERT INTO cluster (only_row, cluster_id) VALUES (1, lower(hex(randomblob(16))));
