"""LASP's schedules against Eq. 10 and 11, and their effect on each kind of RoPE."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from farsight.configs.schema import (
    DynamicNtkRope,
    Lasp,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRotary,
    NtkRope,
    Rope,
    YarnRope,
)
from farsight.model.position.lasp import apply_lasp, lasp_base, lasp_scale
from farsight.model.position.rope import rope_frequencies

# Llama-3-8B as in section 5.2: 32 layers, s from 1 to 16 over 8 anchor layers, b from 500k towards 2M.
SCALES = [1.0, 2.875, 4.75, 6.625, 8.5, 10.375, 12.25, 14.125] + [16.0] * 24
BASES = [500_000.0] * 8 + [500_000.0 + 62_500.0 * step for step in range(24)]
HOSTS = [
    LinearRope(theta=1e4, factor=3.0),
    NtkRope(theta=1e4, factor=3.0),
    DynamicNtkRope(theta=1e4, factor=3.0, original_length=8192),
    YarnRope(theta=1e4, factor=3.0, original_length=8192, beta_fast=30.0),
    Llama3Rope(theta=1e4, factor=3.0),
]


def test_every_layer_of_llama_3_8b():
    for layer in range(32):
        assert lasp_scale(Lasp(), layer) == SCALES[layer]
        assert lasp_base(Lasp(), layer, 32) == BASES[layer]
    assert BASES[-1] == 1_937_500.0  # b_max would be at layer 32


@pytest.mark.parametrize("anchor", [1, 5, 12, 13])
def test_equations_as_printed(anchor):
    s_min, s_max, b_min, b_max, total = Fraction(3, 2), Fraction(11), Fraction(7000), Fraction(90001), 13
    lasp = Lasp(s_min=float(s_min), s_max=float(s_max), b_min=float(b_min), b_max=float(b_max), anchor_layers=anchor)
    for layer in range(total):
        scale = s_min + layer * (s_max - s_min) / anchor if layer < anchor else s_max
        base = b_min if layer < anchor else b_min + (b_max - b_min) / (total - anchor) * (layer - anchor)
        assert lasp_scale(lasp, layer) == pytest.approx(float(scale), rel=1e-14)
        assert lasp_base(lasp, layer, total) == pytest.approx(float(base), rel=1e-14)


def test_all_layers_anchors_keeps_the_base():
    assert [lasp_base(Lasp(anchor_layers=4), layer, 4) for layer in range(4)] == [500_000.0] * 4


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.kind)
@pytest.mark.parametrize("layer", [0, 3, 8, 31])
def test_replaces_the_hosts_own_factor_and_base(host, layer):
    assert apply_lasp(host, Lasp(), layer, 32) == replace(host, factor=SCALES[layer], theta=BASES[layer])
    assert apply_lasp(host, Lasp(schedule="scale"), layer, 32) == replace(host, factor=SCALES[layer])
    assert apply_lasp(host, Lasp(schedule="base"), layer, 32) == replace(host, theta=BASES[layer])


@pytest.mark.parametrize("layer", [0, 3, 8, 31])
def test_bare_rope_is_equation_9(layer):
    scheduled = apply_lasp(Rope(theta=1e4), Lasp(), layer, 32)
    frequencies = rope_frequencies(scheduled, 64, 131072)
    expected = [BASES[layer] ** (-2 * d / 64) / SCALES[layer] for d in range(32)]
    torch.testing.assert_close(
        frequencies.inv_freq.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert frequencies.attention_factor == 1
    assert apply_lasp(Rope(theta=1e4), Lasp(schedule="scale"), layer, 32) == LinearRope(theta=1e4, factor=SCALES[layer])
    assert apply_lasp(Rope(theta=1e4), Lasp(schedule="base"), layer, 32) == Rope(theta=BASES[layer])


def test_yarn_temperature_follows_the_layers_factor():
    host = YarnRope(theta=500000.0, factor=4.0, original_length=8192)
    first, last = (rope_frequencies(apply_lasp(host, Lasp(), layer, 32), 128, 131072) for layer in (0, 31))
    assert first.attention_factor == 1.0  # S(0) = 1: nothing is scaled
    assert last.attention_factor == pytest.approx(1.2772588722239782)  # 0.1 ln 16 + 1
    fixed = apply_lasp(replace(host, attention_factor=1.1), Lasp(), 0, 32)
    assert rope_frequencies(fixed, 128, 131072).attention_factor == 1.1


def test_layers_without_rotation_are_left_alone():
    assert apply_lasp(NoRotary(), Lasp(), 5, 32) == NoRotary()


def test_longrope_takes_a_base_but_no_scale():
    host = LongRope(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
    assert apply_lasp(host, Lasp(schedule="base"), 9, 32) == replace(host, theta=BASES[9])
    for schedule in ("scale", "both"):
        with pytest.raises(ValueError, match=r"factor for each layer|position\.rules"):
            apply_lasp(host, Lasp(schedule=schedule), 9, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s_min": 0.0}, "s_min is 0.0; set"),
        ({"s_max": -1.0}, "s_max is -1.0; set"),
        ({"b_min": 0.0}, "b_min is 0.0; set"),
        ({"b_max": -5.0}, "b_max is -5.0; set"),
        ({"anchor_layers": 0}, "anchor_layers is 0; set it from 1 to 32"),
        ({"anchor_layers": 33}, "anchor_layers is 33; set it from 1 to 32"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        apply_lasp(Rope(), Lasp(**settings), 0, 32)
