import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexray import yaml_text

# Texts that one version of YAML or another reads as something else.
lookalikes = st.from_regex(r"\A[-+.:_~<=# 0-9eExoa]{0,6}\Z") | st.sampled_from(
    ["true", "off", "null", ".NaN", "-.inf", "2026-11-30", "\n", "\x85a"]
)
texts = st.text() | lookalikes
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
trees = st.recursive(
    scalars, lambda t: st.lists(t, max_size=4) | st.dictionaries(texts, t, max_size=4)
)


@given(trees)
def test_what_is_written_reads_back_equal(tree):
    again = yaml_text.load(yaml_text.dump(tree))
    assert again == tree
    assert repr(again) == repr(tree)  # True is not 1, 1.0 is not 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("5.", 5.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("off", "off"),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("2026-11-30", "2026-11-30"),
        ("true", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_as_yaml_1_2_reads_them(text, value):
    read = yaml_text.load(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", r"key a is there twice \(line 2, column 1\)"),
        ("s:\n  a: 1\n  a: 1", r"key a is there twice \(line 3, column 3\)"),
        ("a: [1", "line 1"),
        ("? [1]\n: 2", "a key must be text"),
        ("!!python/object/apply:os.getcwd []", "python"),
        ("!!binary aGk=", "binary"),
        ("a: 1\n---\nb: 2", "another document"),
        (b"\xff\xfe\xff", "unacceptable character"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_not_plain_data_is_one_line(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        yaml_text.load(text)
    assert "\n" not in str(caught.value)
