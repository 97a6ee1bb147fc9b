"""Which layer gets which position: rules, LASP over them, and the printed table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farsight.configs.schema import (
    Alibi,
    Dense,
    Lasp,
    LayerRule,
    LinearRope,
    LongRope,
    NoRotary,
    Position,
    Rope,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.errors import ConfigError
from farsight.model.position.bias import LayerBias
from farsight.model.position.layers import LayerPosition, describe, resolve_layers, select_layers
from farsight.model.position.scope import DENSE_SCOPE, geometric_scopes


def resolve(position, n_layers=8, n_heads=8, n_kv_heads=4, head_dim=16, trained_length=4096, length=4096):
    return resolve_layers(position, n_layers, n_heads, n_kv_heads, head_dim, trained_length, length)


# ── Selections ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("selection", "n_layers", "layers"),
    [
        ("0", 8, {0}),
        ("-1", 8, {7}),
        ("-8", 8, {0}),
        ("0:8", 8, {0, 1, 2, 3, 4, 5, 6, 7}),
        (":", 3, {0, 1, 2}),
        ("-2:", 8, {6, 7}),
        ("3::4", 8, {3, 7}),
        ("3::4", 32, {3, 7, 11, 15, 19, 23, 27, 31}),
        ("0:4,28:", 32, {0, 1, 2, 3, 28, 29, 30, 31}),
        (" 1 , 2 : 4 ", 8, {1, 2, 3}),
        ("1,1:3", 8, {1, 2}),
    ],
)
def test_selections(selection, n_layers, layers):
    assert select_layers(selection, n_layers) == layers


@given(st.integers(1, 12), st.data())
def test_selections_are_python_slices(n_layers, data):
    bound = st.none() | st.integers(-n_layers, n_layers)
    start, stop, step = data.draw(bound), data.draw(bound), data.draw(st.none() | st.integers(1, 5))
    text = ":".join("" if number is None else str(number) for number in (start, stop, step))
    expected = set(range(n_layers)[slice(start, stop, step)])
    if expected:
        assert select_layers(text, n_layers) == expected
    else:
        with pytest.raises(ValueError, match="selects none"):
            select_layers(text, n_layers)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("8", "names 8, but the model has 8 layers"),
        ("-9", "names -9, but the model has 8 layers"),
        ("0:9", "names 9, but the model has 8 layers"),
        ("0,12:", "names 12, but the model has 8 layers"),
        ("5:5", "selects none of the model's 8 layers"),
        ("8:", "selects none of the model's 8 layers"),
        ("::0", "step 0"),
        ("::-1", "step -1"),
        ("", "can't be read"),
        ("0,", "can't be read"),
        ("0-4", "can't be read at '0-4'"),
        ("0:1:2:3", "can't be read"),
        ("all", "can't be read at 'all'"),
        ("1.5", "can't be read"),
    ],
)
def test_bad_selections_name_the_rule_and_the_depth(selection, message):
    rules = (LayerRule(layers="0", rotary=NoRotary()), LayerRule(layers=selection, rotary=NoRotary()))
    with pytest.raises(ValueError, match=message) as error:
        resolve(Position(rules=rules))
    assert str(error.value).startswith("position.rules[1]: ")
    assert repr(selection) in str(error.value)


def test_a_rule_that_sets_nothing_is_refused():
    with pytest.raises(ValueError, match=r"position\.rules\[0\]: layers '0:4' sets nothing"):
        resolve(Position(rules=(LayerRule(layers="0:4"),)))


# ── Layers ────────────────────────────────────────────────────────────────────────────────────────────


def test_without_rules_all_layers_are_alike():
    assert resolve(Position()) == (LayerPosition(Rope(), (DENSE_SCOPE,) * 8, None),) * 8


def test_no_position_in_every_fourth_layer():
    layers = resolve(Position(rules=(LayerRule(layers="3::4", rotary=NoRotary()),)))
    assert [layer.rotary.kind for layer in layers] == ["rope", "rope", "rope", "none"] * 2


def test_mixed_stack_and_later_rules_win():
    scope = Scope(layout="sorted")
    position = Position(
        rotary=Rope(theta=5e5),
        rules=(
            LayerRule(layers="0:4", heads=SlidingWindow(window=512)),
            LayerRule(layers="2:6", rotary=NoRotary(), heads=scope),
            LayerRule(layers="-1", rotary=NoRotary(), bias=Alibi()),
            LayerRule(layers="3", heads=Dense()),
        ),
    )
    layers = resolve(position)
    window, geometric, dense = (512,) * 8, geometric_scopes(4096, 8), (DENSE_SCOPE,) * 8
    assert [layer.scopes for layer in layers] == [window, window, geometric, dense, geometric, geometric, dense, dense]
    assert [layer.rotary.kind for layer in layers] == ["rope"] * 2 + ["none"] * 4 + ["rope", "none"]
    slopes = tuple(2.0**-h for h in range(1, 9))
    assert [layer.alibi_slopes("this test") for layer in layers] == [None] * 7 + [slopes]
    assert layers[0].rotary == Rope(theta=5e5)


def test_scopes_follow_layout_and_length():
    position = Position(rotary=NoRotary(), heads=Scope(scope_max="length"), bias=Alibi(uniform=True))
    (layer,) = set(resolve(position, length=16384))
    assert layer.scopes == tuple(geometric_scopes(16384, 8)[index] for index in (0, 4, 2, 6, 1, 5, 3, 7))
    assert layer.bias == LayerBias("alibi", ((1 / 256,) * 8,))
    assert max(resolve(Position(heads=Scope()), length=16384)[0].scopes) == 4096


def test_a_bias_other_than_alibi_is_refused_by_name():
    layer = LayerPosition(Rope(), (4,), LayerBias("kerple", ((1.0,), (2.0,))))
    with pytest.raises(ConfigError, match='the exported model: there is no bias of kind "kerple" here, only "alibi"'):
        layer.alibi_slopes("the exported model")
    assert "kerple 1 2" in describe((layer,))


def test_lasp_applies_to_what_the_rules_left():
    position = Position(
        rotary=Rope(theta=1e4),
        lasp=Lasp(s_min=1.0, s_max=5.0, b_min=1e4, b_max=9e4, anchor_layers=4),
        rules=(
            LayerRule(layers="1", rotary=NoRotary()),
            LayerRule(layers="5:7", rotary=YarnRope(theta=77.0, factor=2.0, original_length=1024)),
        ),
    )
    assert [layer.rotary for layer in resolve(position)] == [
        LinearRope(theta=1e4, factor=1.0),
        NoRotary(),
        LinearRope(theta=1e4, factor=3.0),
        LinearRope(theta=1e4, factor=4.0),
        LinearRope(theta=1e4, factor=5.0),
        YarnRope(theta=3e4, factor=5.0, original_length=1024),
        YarnRope(theta=5e4, factor=5.0, original_length=1024),
        LinearRope(theta=7e4, factor=5.0),
    ]


def test_bad_mechanism_settings_surface_here():
    with pytest.raises(ValueError, match=r"^position\.lasp\.anchor_layers is 8 by default; set it from 1 to 4"):
        resolve(Position(lasp=Lasp()), n_layers=4)
    with pytest.raises(ValueError, match=r"layer 5.*long_factor.*8 numbers"):
        resolve(Position(rules=(LayerRule(layers="5", rotary=LongRope(short_factor=(1.0,) * 8)),)))
    with pytest.raises(ValueError, match="n_heads"):
        resolve(Position(heads=Scope()), n_heads=6, n_kv_heads=4)


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────


def test_describe_merges_equal_layers():
    position = Position(
        rotary=YarnRope(theta=500000.0, factor=8.0),
        rules=(
            LayerRule(layers="0:2", heads=SlidingWindow(window=512)),
            LayerRule(layers="3::4", rotary=NoRotary(), heads=Scope(), bias=Alibi()),
        ),
    )
    assert describe(resolve(position)).splitlines() == [
        "layers  rotary  theta   factor  scopes   bias",
        "0:2     yarn    500000  8       512      -",
        "2,4:7   yarn    500000  8       all      -",
        "3,7     none    -       -       3..4096  alibi 0.003906..0.5",
    ]


def test_describe_shows_each_lasp_layer():
    rows = describe(resolve(Position(lasp=Lasp(anchor_layers=2), heads=Scope()))).splitlines()
    assert len(rows) == 1 + 8
    assert rows[2].split() == ["1", "linear", "500000", "8.5", "3..4096", "-"]
    assert rows[-1].split() == ["7", "linear", "1750000", "16", "3..4096", "-"]
    longrope = LongRope(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
    assert "by dimension" in describe(resolve(Position(rotary=longrope, bias=Alibi(uniform=True))))


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_described_layers_read_back_as_a_selection(rotated):
    layers = tuple(LayerPosition(Rope() if turn else NoRotary(), (4,), None) for turn in rotated)
    for row in describe(layers).splitlines()[1:]:
        selection, kind = row.split()[:2]
        named = {layer for layer, turn in enumerate(rotated) if turn == (kind == "rope")}
        assert select_layers(selection, len(rotated)) == named
