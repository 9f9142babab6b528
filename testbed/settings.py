"""Settings of the client: flag, then `RLTUNE_*`, then the user's file, then the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.client_errors import InvalidRequest
from testbed.nearest import did_you_mean

DEFAULT_CONTROLLER = "127.0.0.1:7817"


class BadSettings(InvalidRequest):
    """A settings file, variable or flag that cannot be meant."""

    default_code = "invalid_settings"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting by name, its value and where that is from."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class _Known:
    """A setting that exists."""

    key: str
    """`section.name` in the file."""
    variable: str
    default: str


KNOWN = (_Known("client.controller", "RLTUNE_CONTROLLER", DEFAULT_CONTROLLER),)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one command."""

    path: Path
    """The user's file, whether or not it exists."""
    items: tuple[Setting, ...]

    @property
    def controller(self) -> str:
        """Address of the controller, `HOST:PORT`."""
        return next(item.value for item in self.items if item.key == "client.controller")


def config_path(environ: Mapping[str, str]) -> Path:
    """The user's settings file, as the XDG base directory specification places it."""
    base = environ.get("XDG_CONFIG_HOME", "")
    # The specification: a relative path there is invalid and must be ignored.
    folder = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/")) / ".config"
    return folder / "rltune" / "config.toml"


def load_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """Settings from `flags` (by key), the environment and the user's file.

    Raises:
        BadSettings: the file is not TOML or has an unknown key, or an address is no address.
    """
    path = config_path(environ)
    from_file = _read_file(path)
    items = tuple(_resolve(known, flags, environ, from_file, path) for known in KNOWN)
    settings = Settings(path, items)
    check_address(settings.controller)
    return settings


def _resolve(
    known: _Known,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    from_file: Mapping[str, str],
    path: Path,
) -> Setting:
    if known.key in flags:
        return Setting(known.key, flags[known.key], "flag")
    if environ.get(known.variable):
        return Setting(known.key, environ[known.variable], f"environment {known.variable}")
    if known.key in from_file:
        return Setting(known.key, from_file[known.key], str(path))
    return Setting(known.key, known.default, "default")


def _read_file(path: Path) -> Mapping[str, str]:
    if not path.exists():
        return {}
    import tomllib  # noqa: PLC0415 - most people have no file

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSettings(f"{path}: {error}", "mend or remove the file") from None
    keys = [known.key for known in KNOWN]
    values: dict[str, str] = {}
    for section, content in document.items():
        if not isinstance(content, dict):
            hint = did_you_mean(f"client.{section}", keys)
            raise BadSettings(f"{path}: {section!r} stands in no section", hint)
        for name, value in content.items():
            key = f"{section}.{name}"
            if key not in keys:
                raise BadSettings(f"{path}: unknown key {key!r}", did_you_mean(key, keys))
            if not isinstance(value, str):
                raise BadSettings(f"{path}: {key} must be a text", 'write it in quotes: "..."')
            values[key] = value
    return values


def check_address(address: str) -> None:
    """Refuse what is not `HOST:PORT`.

    Raises:
        BadSettings: it is something else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise BadSettings(
            f"{address!r} is not the address of a controller",
            "write HOST:PORT, e.g. 127.0.0.1:7817",
        )
    if not all(c.isalnum() or c in ".-_:[]%" for c in host):
        raise BadSettings(f"{host!r} is not the name of a host", "write HOST:PORT")


def is_local(address: str) -> bool:
    """Whether an address is on this machine for certain."""
    import ipaddress  # noqa: PLC0415 - only submit asks

    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
