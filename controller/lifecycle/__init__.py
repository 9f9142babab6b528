"""Pure rules of jobs, attempts and nodes: (state, event) -> (state, effects)."""
