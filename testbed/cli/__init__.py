"""The rltune command, one module per group of commands."""
