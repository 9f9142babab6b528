"""Real training programs, runnable by hand and by name."""
