"""Everything people touch: command line, client, local clusters, reports."""
