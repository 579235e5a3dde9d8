"""Conversations as the input has them: what is a list of messages, and what is none."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from flexray.datasets.errors import CorpusError

ASSISTANT = "assistant"
Message = dict[str, Any]

# What a message may have in place of content; whose names chat templates agree on.
_ELSE = (
    *("tool_calls", "function_call", "tool_plan", "tool_responses"),
    *("reasoning_content", "reasoning", "thinking"),
)


def check_messages(messages: Any) -> list[Message]:
    """Messages as they are, if that is what they are.

    Raises:
        CorpusError: they are no list of objects with a role, and with content (text, or a list of
            parts) or something known in its place; or they are not valid Unicode.
    """
    if not isinstance(messages, list):
        raise CorpusError(f"{_short(messages)} is not a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise CorpusError(f"message {i}: {_short(message)} is not an object with role, content")
        if not isinstance(message.get("role"), str):
            raise CorpusError(
                f"message {i}: has no role; it has {', '.join(message) or 'nothing'}: give role "
                "and content"
            )
        _check_content(message, f"message {i}")
        _check_unicode(message, f"message {i}")
    return messages


def check_tools(tools: Any) -> list[Any] | None:
    """Tools of a conversation: a list, or JSON text of one; None or nothing for none.

    Raises:
        CorpusError: they are something else, or not valid Unicode.
    """
    found = tools
    if isinstance(tools, str):
        with suppress(ValueError):
            found = json.loads(tools or "null")
    if found is None or isinstance(found, list):
        _check_unicode(found, "tools")
        return found or None
    raise CorpusError(f"tools {_short(tools)} are not a list of JSON schemas")


def joined_text(parts: list[Any]) -> str | None:
    """The text of content in parts, where all of it is text."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else None


def _check_content(message: Message, name: str) -> None:
    content = message.get("content")
    if content is None:
        if not any(message.get(key) for key in _ELSE):
            raise CorpusError(
                f"{name}: has no content; it has {', '.join(message)}: give content, "
                '"" where nothing is said'
            )
    elif isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or (
                kind == "text" and not isinstance(part.get("text"), str)
            ):
                raise CorpusError(
                    f"{name}: {_short(part)} is not a part of content, such as "
                    '{"type": "text", "text": ...}'
                )
    elif not isinstance(content, str):
        raise CorpusError(f"{name}: content {_short(content)} is not text or a list of parts")


def _check_unicode(value: Any, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        wrong = json.dumps(error.object[error.start])
        raise CorpusError(
            f"{name}: {wrong} is half a character, not valid Unicode; write it whole or leave it "
            "out"
        ) from None


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
