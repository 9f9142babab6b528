"""What the store raises.

StoreUnavailable     the database cannot be used now (disk full, locked, I/O error)
├── StoreInUse       another controller has it open
├── StoreDamaged     the file is no sound database (any more)
└── StoreTooNew      a newer version of the program wrote it
StoreRefused         the schema's guards refused a change: a bug above the store
"""

from __future__ import annotations


class StoreUnavailable(Exception):
    """The database cannot be used now; nothing was changed. The message is for the operator."""


class StoreInUse(StoreUnavailable):
    """Another process holds the database."""


class StoreDamaged(StoreUnavailable):
    """The file is no sound database; waiting does not mend it."""


class StoreTooNew(StoreUnavailable):
    """The database's schema is newer than this program knows."""


class StoreRefused(Exception):
    """A guard of the schema refused a change; nothing was changed."""
