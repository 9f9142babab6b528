"""Policies that order the waiting jobs."""
