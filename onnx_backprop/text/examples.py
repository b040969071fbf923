"""`read_examples`: files of texts, prompts with answers, and conversations, as tokens."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError, warn
from onnx_backprop.text.templates import Template, template_for
from onnx_backprop.text.tokenizer import IGNORED, Span, Tokenizer, Tokens

EXPECTED = '{"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}, …]}'
_KINDS = ({"text"}, {"prompt", "completion"}, {"messages"})
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_examples(
    paths: str | Path | Iterable[str | Path], tokenizer: Tokenizer, *, template: str | None = None
) -> list[Tokens]:
    """The examples of files, in their order.

    A .jsonl file has one example per line: {"text": …}, all of which is learned; {"prompt": …, "completion": …}, of
    which the completion is learned; {"messages": [{"role": …, "content": …}, …]}, of which the assistant's messages are
    learned, except those with "weight": 0. Empty lines are skipped. Any other file is one text. template: how
    conversations are written; default: as the tokenizer's configuration says, see `TEMPLATES`.

    Errors: InvalidArgumentError, with file and line, for what cannot be read or is none of these.
    """
    chosen = cache(lambda: template_for(tokenizer, template))  # a file of plain texts needs none
    result: list[Tokens] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        text = read_text(path)
        lines = enumerate(text.split("\n"), 1) if path.suffix == ".jsonl" else [(0, text)]
        before = len(result)
        for number, line in lines:
            where = f"{path}, line {number}" if number else str(path)
            if not line.strip():
                continue
            try:
                result.append(tokens_of(line, tokenizer, chosen) if number else _tokens(tokenizer, [(line, True)]))
            except OnnxBackpropError as e:
                raise type(e)(f"{where}: {e}") from e
        if len(result) == before:
            raise InvalidArgumentError(f"{path} holds no text. Each line of a .jsonl is {EXPECTED}")
    if template is not None and not chosen.cache_info().currsize:
        warn("has no effect: no line holds 'messages', which it would write", argument="template")
    return result


def tokens_of(line: str, tokenizer: Tokenizer, template: Callable[[], Template]) -> Tokens:
    """The tokens of one line of a .jsonl; InvalidArgumentError for a bad one."""
    spans, written = _spans(line, template)
    return _tokens(tokenizer, spans, written=written)


def read_text(path: Path) -> str:
    """What a file holds, with line feeds alone; InvalidArgumentError for one that cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise InvalidArgumentError(f"{path}, line {line}: not UTF-8, at byte {e.start}. Convert the file") from e
    except OSError as e:
        raise InvalidArgumentError(f"{path} cannot be read: {e.strerror or e}") from e


def _tokens(tokenizer: Tokenizer, spans: list[Span], *, written: bool = False) -> Tokens:
    result = tokenizer.encode(spans, begins=False if written else None)
    if not (result.labels[1:] != IGNORED).any():
        raise InvalidArgumentError("there is nothing to learn: one token, or no answer")
    return result


def _spans(line: str, template: Callable[[], Template]) -> tuple[list[Span], bool]:
    """The parts of the text of one line, and whether a template has written it, which says how it begins."""
    try:
        example = json.loads(line)
    except ValueError as e:
        raise InvalidArgumentError(f"expected {EXPECTED}, got no JSON: {e}") from e
    keys = example.keys() if isinstance(example, dict) else set()
    if len(kinds := [kind for kind in _KINDS if not kind.isdisjoint(keys)]) > 1:
        both = ", ".join(repr(key) for key in keys if any(key in kind for kind in kinds))
        raise InvalidArgumentError(f"expected {EXPECTED}, got {both} in one line. Keep the keys of one form")
    if "messages" in keys:
        return _conversation(example["messages"], template), True
    if keys >= {"prompt", "completion"}:
        prompt, completion = (_string(example, key) for key in ("prompt", "completion"))
        return [(prompt, False), (completion, True)] if prompt else [(completion, True)], False
    if "text" in keys:
        return [(_string(example, "text"), True)], False
    got = f"an object of {', '.join(map(repr, keys)) or 'nothing'}" if keys or example == {} else type(example).__name__
    raise InvalidArgumentError(f"expected {EXPECTED}, got {got}")


def _string(example: Mapping[str, Any], key: str) -> str:
    value = example[key]
    if not isinstance(value, str) or (not value and key != "prompt"):
        raise InvalidArgumentError(f"{key!r}: expected a text, got {value if value == '' else type(value).__name__!r}")
    return value


def _conversation(messages: Any, template: Callable[[], Template]) -> list[Span]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidArgumentError("'messages': expected a list of objects with 'role' and 'content'")
    checked = []
    for n, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise InvalidArgumentError(f"message {n + 1}: expected a 'role' of {', '.join(_ROLES)}, got {role!r}")
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise InvalidArgumentError(f"message {n + 1}: expected a text as 'content', got {type(content).__name__}")
        if message.get("weight", 1) not in (0, 1):
            raise InvalidArgumentError(f"message {n + 1}: expected a 'weight' of 0 or 1, got {message['weight']!r}")
        checked.append(message | {"content": content})
    if not any(message["role"] == "assistant" for message in checked):
        raise InvalidArgumentError("'messages': expected at least one of role 'assistant', which is what is learned")
    return template()(checked)
