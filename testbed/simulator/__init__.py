"""Replays jobs against the scheduler's own code under a virtual clock."""
