"""Metrics and reports of a run, made from what the controller recorded and nothing else."""
