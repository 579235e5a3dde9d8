"""Chats: rendered by the tokenizer's own chat template, labels on the assistant's turns only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo
from flexray.datasets.tokenizer import HuggingFaceTokenizer, bare_file, load_transformers
from flexray.datasets.writer import IGNORED_LABEL

if TYPE_CHECKING:
    import transformers

Int32Array = npt.NDArray[np.int32]
Message = dict[str, Any]

ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer:
    """A tokenizer with a chat template.

    Where the template says by `{% generation %}` what the assistant says, those tokens are labels.
    Elsewhere a turn of the assistant is what the template adds to the conversation before it, as
    it is rendered for the model to answer: that must be the beginning of the whole, to the letter,
    or the chat is refused.
    """

    def __init__(self, name: str, loaded: transformers.PreTrainedTokenizerFast) -> None:
        loaded.model_max_length = 1 << 62  # the over-length policy decides what is too long
        self._loaded = loaded
        backend = HuggingFaceTokenizer(name, loaded.backend_tokenizer)
        template = json.dumps(loaded.chat_template, sort_keys=True)
        self.info: TokenizerInfo = backend.info.model_copy(
            update={"chat_template_sha256": hashlib.sha256(template.encode()).hexdigest()}
        )
        self.vocab_size = backend.vocab_size

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Int32Array, Int32Array]:
        """Token ids of a conversation and its labels, (n,) each; -100 where not the assistant's.

        Args:
            messages: with `role` and what else the template reads; see `check_messages`.
            tools: as the template takes them: JSON schemas.

        Raises:
            CorpusError: the template refuses the conversation, or does not tell its turns apart;
                the message does not say which conversation it is.
        """
        tools = list(tools) if tools else None
        if _GENERATION.search(self._loaded.get_chat_template(None, tools)):
            out = self._apply(
                messages,
                tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids = np.array(out["input_ids"], np.int32)
            spoken = np.array(out["assistant_masks"], bool)
        else:
            text, turns = self._render(messages, tools)
            encoding = self._loaded.backend_tokenizer.encode(text, add_special_tokens=False)
            ids = np.array(encoding.ids, np.int32)
            spoken = _overlapping(np.array(encoding.offsets, np.int64).reshape(-1, 2), turns)
        return ids, np.where(spoken, ids, np.int32(IGNORED_LABEL))

    def _render(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation, and where in it (characters) the assistant's turns are."""
        whole = self._apply(messages, tools, tokenize=False)
        turns = []
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            if i == 0:
                raise CorpusError(
                    "the conversation begins with the assistant, and the chat template does not "
                    f"say where its turn begins: {_HINT}"
                )
            prompt = self._apply(messages[:i], tools, tokenize=False, add_generation_prompt=True)
            told = self._apply(messages[: i + 1], tools, tokenize=False)
            if not (told.startswith(prompt) and whole.startswith(told)):
                raise CorpusError(
                    f"message {i}: the chat template renders this turn of the assistant otherwise "
                    f"when more follows or when it is to be answered: {_HINT}"
                )
            turns.append((len(prompt), len(told)))
        return whole, turns

    def _apply(self, messages: Sequence[Message], tools: list[Any] | None, **settings: Any) -> Any:
        try:
            return self._loaded.apply_chat_template(list(messages), tools=tools, **settings)
        except Exception as error:  # whatever a template's author raises, or forgets to
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CorpusError(f"the chat template refuses the conversation ({reason})") from None


_HINT = "put {% generation %} around the assistant's part in the tokenizer's chat template"


def load_chat_tokenizer(name: str) -> ChatTokenizer:
    """The tokenizer called `name`, as `load_tokenizer` knows it, with its chat template.

    Raises:
        CorpusError: it cannot be loaded, or has no chat template.
    """
    if name != "bytes" and not bare_file(name):
        loaded = load_transformers(name)
        if loaded.chat_template:
            return ChatTokenizer(name, loaded)
    raise CorpusError(
        f"tokenizer {name}: has no chat template, which a column of chat messages needs; name a "
        "tokenizer folder or model with one, or the text column"
    )


def check_messages(messages: Any) -> list[Message]:
    """Messages as they are, if that is what they are.

    Raises:
        CorpusError: they are no list of objects with a role.
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
    return messages


def check_tools(tools: Any) -> list[Any] | None:
    """Tools of a conversation: a list, or JSON text of one; None or nothing for none.

    Raises:
        CorpusError: they are something else.
    """
    found = tools
    if isinstance(tools, str):
        with suppress(ValueError):
            found = json.loads(tools or "null")
    if found is None or isinstance(found, list):
        return found or None
    raise CorpusError(f"tools {_short(tools)} are not a list of JSON schemas")


def _overlapping(
    offsets_N2: npt.NDArray[np.int64], turns: list[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Which of N tokens have a character in one of the turns, as `transformers` counts them."""
    spoken = np.zeros(len(offsets_N2), bool)
    for begin, end in turns:
        spoken |= (offsets_N2[:, 1] > begin) & (offsets_N2[:, 0] < end)
    return spoken


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
