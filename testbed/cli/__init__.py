"""The command `rltune`: one module a group of commands, `main` puts them together."""
