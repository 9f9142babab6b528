"""YAML in which every scalar is the text that was written.

YAML 1.1 guesses types: `time: 12:00:00` would be the number 43200, `A: no` false and `1e3` a
float. Here the reader of a value decides what it means. Lines are kept for error messages, a
key given twice is an error, and so is a file that grows without bound by aliases.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_NODES = 20_000
"""Aliases of aliases can make a small file stand for billions of values."""
MAX_DEPTH = 30
_NULLS = {"", "~", "null", "Null", "NULL"}
_TAG = "tag:yaml.org,2002:"
_TAGS = {
    yaml.ScalarNode: {"str", "int", "float", "bool", "null", "timestamp", "merge", "value"},
    yaml.SequenceNode: {"seq"},
    yaml.MappingNode: {"map"},
}
"""Those that plain YAML has by itself; all others would change what a value means."""

Path = tuple[str | int, ...]


class YamlProblem(ValueError):
    """Text that is not YAML, or not YAML that we take."""

    def __init__(self, line: int, problem: str, hint: str) -> None:
        """`line` counts from 1."""
        self.line = line
        self.hint = hint
        super().__init__(problem)


def load_yaml(text: str) -> tuple[Any, dict[Path, int]]:
    """The document as dicts, lists, strings and None, and the line of each value by its path.

    Raises:
        YamlProblem: it cannot be read.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise YamlProblem(line, str(error.problem or error.context), "it is not YAML") from None
    except RecursionError:
        raise YamlProblem(1, "the values are nested too deeply", "is it a job file?") from None
    except yaml.YAMLError as error:
        raise YamlProblem(1, " ".join(str(error).split()), "it is not YAML") from None
    lines: dict[Path, int] = {}
    return (None if root is None else _value(root, (), lines)), lines


def _value(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    line = node.start_mark.line + 1
    lines[path] = line
    if len(lines) > MAX_NODES or len(path) > MAX_DEPTH:
        raise YamlProblem(line, "the file stands for too many values", "do without aliases")
    _check_tag(node)
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in _NULLS else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, i), lines) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    values: dict[str, Any] = {}
    for key, item in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise YamlProblem(line, "a key must be plain text", "quote it")
        _check_tag(key)
        if key.value in values:
            raise YamlProblem(
                key.start_mark.line + 1, f"the key {key.value!r} is there twice", "keep one of them"
            )
        values[key.value] = _value(item, (*path, key.value), lines)
        lines[*path, key.value] = key.start_mark.line + 1
    return values


def _check_tag(node: yaml.Node) -> None:
    if node.tag.removeprefix(_TAG) not in _TAGS[type(node)]:
        tag = node.tag.replace(_TAG, "!!")
        raise YamlProblem(
            node.start_mark.line + 1, f"the tag {tag} is not taken", "write the value without it"
        )
