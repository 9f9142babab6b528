"""The node agent: telemetry, launching and the session with the controller."""
