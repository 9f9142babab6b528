"""Workload traces: one table, readers of public formats, and a generator."""
