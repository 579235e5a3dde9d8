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
from flexray.datasets.messages import ASSISTANT, Message, joined_text
from flexray.datasets.tokenizer import HuggingFaceTokenizer, bare_file, load_transformers
from flexray.datasets.writer import IGNORED_LABEL

if TYPE_CHECKING:
    import transformers

Int32Array = npt.NDArray[np.int32]

# No template strips, splits or escapes it. A conversation that has it too is no less safe: where it
# is found twice, it says nothing.
_OTHER_WORDS = "FlexRay8c1f06d2b7e94a35"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer:
    """A tokenizer with a chat template.

    Where the template says by `{% generation %}` what the assistant says, those tokens are labels.
    Elsewhere each of its turns is found in the rendered conversation: see `_turn`.
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
        added = [token.content for token in loaded.added_tokens_decoder.values()]
        # Blank ones are runs of spaces in some vocabularies, and end nothing.
        self._marks = tuple(mark for mark in added if mark.strip())
        self._next_mark = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._marks))})")

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Int32Array, Int32Array]:
        """Token ids of a conversation and its labels, (n,) each; -100 where not the assistant's.

        Args:
            messages: with `role` and what else the template reads, as `check_messages` has them.
            tools: as the template takes them: JSON schemas.

        Raises:
            CorpusError: the template refuses the conversation, or does not tell its turns apart;
                the message does not say which conversation it is.
        """
        tools = list(tools) if tools else None
        messages = self._readable(messages, tools)
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
            whole = self._apply(messages, tools, tokenize=False)
            turns = [
                self._turn(messages, i, tools, whole)
                for i, message in enumerate(messages)
                if message["role"] == ASSISTANT
            ]
            encoding = self._loaded.backend_tokenizer.encode(whole, add_special_tokens=False)
            ids = np.array(encoding.ids, np.int32)
            spoken = _overlapping(np.array(encoding.offsets, np.int64).reshape(-1, 2), turns)
        return ids, np.where(spoken, ids, np.int32(IGNORED_LABEL))

    def _readable(self, messages: Sequence[Message], tools: list[Any] | None) -> list[Message]:
        """Messages with text in place of parts where the template does not read parts."""
        found = list(messages)
        for i, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, list) and not self._reads_parts(found, i, tools):
                text = joined_text(content)
                if text is None:
                    kind = next(part["type"] for part in content if part["type"] != "text")
                    raise CorpusError(
                        f"message {i}: the chat template does not read content in parts, and one "
                        f"is no text ({kind}); give text, or a tokenizer whose template does"
                    )
                found[i] = {**message, "content": text}
        return found

    def _reads_parts(self, messages: list[Message], i: int, tools: list[Any] | None) -> bool:
        """Whether other words in a part of message i are rendered, and not Python's repr of it."""
        parts = _other_words(messages[i])
        other = [*messages[:i], {**messages[i], "content": parts}, *messages[i + 1 :]]
        with suppress(CorpusError):
            rendered: str = self._apply(other, tools, tokenize=False)
            return _OTHER_WORDS in rendered and str(parts) not in rendered
        return False

    def _turn(
        self, messages: Sequence[Message], i: int, tools: list[Any] | None, whole: str
    ) -> tuple[int, int]:
        """Where in the whole conversation, in characters, is what the assistant says in message i.

        It is what stands in the place of other words that the assistant says instead: the whole
        begins and ends, to the letter, with what is around them. A template may write something
        else before a turn that thinks, or around one that calls tools. Then it begins where the
        conversation before it, rendered to be answered, ends, and ends where the conversation up
        to it does; the whole must begin with either.

        The mark that ends the turn is of it, and nothing after the mark is.
        """
        before, until, after = messages[:i], messages[: i + 1], messages[i + 1 :]
        begin = end = None
        with suppress(CorpusError):
            instead = {"role": ASSISTANT, "content": _other_words(messages[i])}
            other = self._apply([*before, instead, *after], tools, tokenize=False)
            head, *tails = other.split(_OTHER_WORDS)
            if len(tails) == 1 and whole.startswith(head):
                begin = len(head)
            if len(tails) == 1 and whole.endswith(tails[0]):
                said = len(whole) - len(tails[0])
                if self._is_of_the_turn(whole[:said], until, after, tools):
                    mark = self._next_mark.match(whole, said)
                    end = mark.end() if mark else said
        with suppress(CorpusError):
            if begin is None:
                prompt = self._apply(before, tools, tokenize=False, add_generation_prompt=True)
                begin = len(prompt) if whole.startswith(prompt) else None
            if end is None:
                told = self._apply(until, tools, tokenize=False)
                bare = told.rstrip() if told.rstrip().endswith(self._marks) else told
                end = len(bare) if whole.startswith(told) else None
        if begin is None or end is None or begin > end:
            raise CorpusError(
                f"message {i}: the chat template does not show where this turn of the assistant "
                "begins and ends: put {% generation %} around the assistant's part in the "
                "tokenizer's chat template"
            )
        return begin, end

    def _is_of_the_turn(
        self, said: str, until: Sequence[Message], after: Sequence[Message], tools: list[Any] | None
    ) -> bool:
        """Whether `said` ends before the answer of a tool, which a template may add to its call."""
        if not after or after[0]["role"] == "user":
            return True
        answer = {**after[0], "content": _other_words(after[0])}
        answered: str = self._apply([*until, answer, *after[1:]], tools, tokenize=False)
        return answered.startswith(said)

    def _apply(self, messages: Sequence[Message], tools: list[Any] | None, **settings: Any) -> Any:
        try:
            return self._loaded.apply_chat_template(list(messages), tools=tools, **settings)
        except Exception as error:  # whatever a template's author raises, or forgets to
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CorpusError(f"the chat template refuses the conversation ({reason})") from None


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


def _other_words(message: Message) -> Any:
    """Other content for a message, of the same shape: text, or a list of parts."""
    parts = isinstance(message.get("content"), list)
    return [{"type": "text", "text": _OTHER_WORDS}] if parts else _OTHER_WORDS


def _overlapping(
    offsets_N2: npt.NDArray[np.int64], turns: list[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Which of N tokens have a character in one of the turns, as `transformers` counts them."""
    spoken = np.zeros(len(offsets_N2), bool)
    for begin, end in turns:
        spoken |= (offsets_N2[:, 1] > begin) & (offsets_N2[:, 0] < end)
    return spoken
