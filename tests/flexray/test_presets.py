"""Presets hold the published figures, and what is wrong in one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexray.errors import UserError
from flexray.presets import FOLDER, load_preset, preset_names

# FlexSP's parameters in 1024^3 at 192K and 384K positions, and activation MB per token.
PUBLISHED = {
    "gpt-7b-a100-40g": (7.11745, 7.84987, 4.480441895),
    "gpt-13b-a100-40g": (13.11605, 14.03158, 4.220439453),
    "gpt-30b-a100-40g": (31.52514, 32.71532, 3.417381836),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_is_the_published_one_at_both_context_lengths(name: str) -> None:
    *parameters, activation = PUBLISHED[name]
    for positions, published in zip((192_000, 384_000), parameters, strict=True):
        cost = load_preset(name).with_max_length(positions).cost
        assert cost.state_mb / 16 / 1024 == pytest.approx(published, abs=1e-5)
        expected = int((30 * 1024 - published * 16 / 64 * 1024) // activation)
        assert cost.capacity(64) == expected


def test_gpt_7b() -> None:
    preset = load_preset("gpt-7b-a100-40g")
    assert preset.cost.capacity(64) == 6449
    assert preset.cluster.node_sizes == (8,) * 8
    assert preset.degrees == (1, 2, 4, 8, 16, 32, 64)
    by_degree = {o.degree: o for o in preset.cost.options(preset.cluster, preset.degrees)}
    # All-to-all MB of a rank: 16 x layers x hidden x tokens / 2^20 / d.
    exchange = 16 * 32 * 4096 / 2**20
    assert by_degree[16].linear == pytest.approx((0.1839576 + exchange / 10.33) / 16)
    assert by_degree[16].quadratic == pytest.approx(5.128e-6 / 16)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    preset = load_preset(name)
    assert preset.cost.options(preset.cluster, preset.degrees)
    assert load_preset(FOLDER / f"{name}.yaml") == preset


@pytest.mark.parametrize(
    ("line", "wrong", "says"),
    [
        ("ms_per_token: 0.05", "ms_per_token: .nan", "time.ms_per_token: .*not nan"),
        ("ms_per_token: 0.05", "ms_per_token: -1", "time.ms_per_token: .*not -1"),
        ("ms_per_token: 0.05", "ms_per_token: fast", "time.ms_per_token: .*not 'fast'"),
        ("gpus: 4\n", "gpus: 0\n", "cluster.gpus: .*not 0"),
        ("usable_mb", "usable_gb", "usable_gb: did you mean memory.usable_mb"),
        ("4: 0.4", "4: 0.0", "bandwidth_mb_per_ms.4"),
        ("heads: 8", "heads: [8", "line"),
    ],
)
def test_a_wrong_value_names_file_and_key(tmp_path: Path, line: str, wrong: str, says: str) -> None:
    text = (FOLDER / "cpu.yaml").read_text()
    assert line in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(line, wrong, 1))
    with pytest.raises(UserError, match=says) as caught:
        load_preset(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean gpt-7b-a100-40g"):
        load_preset("gpt-7b-a100-40b")
    with pytest.raises(UserError, match=r"nowhere.yaml: No such file"):
        load_preset("nowhere.yaml")
