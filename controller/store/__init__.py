"""The SQLite store: the only truth of the controller."""
