"""Values that should not be seen over a shoulder or land in a log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[_-])(token|secret|passw(or)?d|passphrase|credentials?|(api|access|private|secret|auth)?[_-]?key)s?($|[_-])",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ya29\.)[A-Za-z0-9_.-]{12,}"
)


def hide_secret_values(env: Mapping[str, str]) -> dict[str, str]:
    """An environment with `***` for values whose name or form says that they are secret."""
    return {
        name: HIDDEN if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in env.items()
    }


def secret_looking_argument(argv: Sequence[str]) -> str | None:
    """The first argument that looks like a secret, by its name; None if there is none.

    Everybody on a node can read the arguments of its processes.
    """
    for i, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if option.startswith("--") and _SECRET_NAME.search(option.lstrip("-")):
            given = value if equals else next(iter(argv[i + 1 : i + 2]), "")
            if given and not given.startswith(("-", "$")):
                return option
        if _SECRET_VALUE.search(word):
            return f"argument {i}"
    return None
