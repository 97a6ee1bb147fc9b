"""RoPE frequencies and rotation against transformers, NTK and sinusoids against their formulas."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from farsight.configs.schema import (
    DynamicNtkRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRotary,
    NtkRope,
    Rope,
    YarnRope,
)
from farsight.model.position import rope as position_rope
from farsight.model.position.rope import RopeFrequencies, rope_frequencies, rope_tables, rotate
from farsight.model.position.sinusoidal import sinusoidal_embedding

HEAD_DIMS = [16, 64, 80, 128]
THETAS = [10000.0, 500000.0, 1234567.0]


def transformers_frequencies(kind, head_dim, length, original_length, **parameters):
    """Frequencies from transformers. `dynamic` takes its original length from max_position_embeddings."""
    extends = kind != "dynamic"
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8 * original_length if extends else original_length,
        rope_parameters={
            "rope_type": kind,
            **({"original_max_position_embeddings": original_length} if extends and kind != "linear" else {}),
            **parameters,
        },
    )
    return ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=length)


def assert_same(ours: RopeFrequencies, theirs):
    inv_freq, attention_factor = theirs
    assert ours.inv_freq.dtype == torch.float32
    assert ours.inv_freq.shape == inv_freq.shape
    torch.testing.assert_close(ours.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("theta", THETAS)
class TestAgainstTransformers:
    def test_plain(self, head_dim, theta):
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
        theirs = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        assert_same(rope_frequencies(Rope(theta=theta), head_dim, 100), theirs)

    @pytest.mark.parametrize("factor", [1.0, 4.0, 7.3])
    def test_linear(self, head_dim, theta, factor):
        theirs = transformers_frequencies("linear", head_dim, 100, 2048, rope_theta=theta, factor=factor)
        assert_same(rope_frequencies(LinearRope(theta=theta, factor=factor), head_dim, 100), theirs)

    @pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 8192, 131072])
    def test_dynamic(self, head_dim, theta, length):
        theirs = transformers_frequencies("dynamic", head_dim, length, 2048, rope_theta=theta, factor=4.0)
        ours = rope_frequencies(DynamicNtkRope(theta=theta, factor=4.0, original_length=2048), head_dim, length)
        assert_same(ours, theirs)
        assert torch.equal(ours.inv_freq, rope_frequencies(Rope(theta=theta), head_dim, 1).inv_freq) == (length <= 2048)

    @pytest.mark.parametrize(
        "settings",
        [
            {"factor": 16.0},
            {"factor": 1.0},
            {"factor": 0.5},
            {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0},
            {"factor": 8.0, "truncate": False},
            {"factor": 8.0, "attention_factor": 1.7},
            {"factor": 32.0, "beta_fast": 64.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.9},
            {"factor": 4.0, "beta_fast": 1000.0, "beta_slow": 660.0},  # both ends of the ramp at dimension 0
            {"factor": 4.0, "beta_slow": 1e-12},  # its far end clamps to H - 1
        ],
    )
    def test_yarn(self, head_dim, theta, settings):
        theirs = transformers_frequencies("yarn", head_dim, 100, 4096, rope_theta=theta, **settings)
        assert_same(rope_frequencies(YarnRope(theta=theta, original_length=4096, **settings), head_dim, 100), theirs)

    @pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (3.0, 0.7, 9.0)])
    def test_llama3(self, head_dim, theta, factor, low, high):
        theirs = transformers_frequencies(
            "llama3", head_dim, 100, 8192, rope_theta=theta, factor=factor, low_freq_factor=low, high_freq_factor=high
        )
        ours = Llama3Rope(theta=theta, factor=factor, low_freq_factor=low, high_freq_factor=high, original_length=8192)
        assert_same(rope_frequencies(ours, head_dim, 100), theirs)

    @pytest.mark.parametrize("length", [10, 4096, 4097, 32768])
    @pytest.mark.parametrize("settings", [{"factor": 32.0}, {"factor": 1.0}, {"factor": 8.0, "attention_factor": 1.3}])
    def test_longrope(self, head_dim, theta, length, settings):
        short = tuple(1.0 + 0.01 * i for i in range(head_dim // 2))
        long = tuple(1.0 + 0.7 * i for i in range(head_dim // 2))
        theirs = transformers_frequencies(
            "longrope",
            head_dim,
            length,
            4096,
            rope_theta=theta,
            short_factor=list(short),
            long_factor=list(long),
            **settings,
        )
        ours = LongRope(theta=theta, original_length=4096, short_factor=short, long_factor=long, **settings)
        assert_same(rope_frequencies(ours, head_dim, length), theirs)

    @pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
    def test_ntk_formula(self, head_dim, theta, factor):
        base = theta * factor ** (head_dim / (head_dim - 2))
        expected = torch.tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
        ours = rope_frequencies(NtkRope(theta=theta, factor=factor), head_dim, 100)
        torch.testing.assert_close(ours.inv_freq.double(), expected, rtol=1e-6, atol=0)
        # The purpose of the formula: the slowest frequency is divided by the factor, the fastest is kept.
        plain = rope_frequencies(Rope(theta=theta), head_dim, 100).inv_freq
        assert (plain[-1] / ours.inv_freq[-1]).item() == pytest.approx(factor, rel=1e-5)
        assert ours.inv_freq[0] == 1
        assert ours.attention_factor == 1


def test_yarn_attention_factor_is_the_papers():
    """YaRN, Eq. 15 and the sentence after it: sqrt(1/t) = 0.1 ln(s) + 1, here multiplied into both q and k."""
    assert rope_frequencies(YarnRope(factor=16.0), 64, 1).attention_factor == pytest.approx(1.2772588722239782)


def test_frequencies_ignore_default_device_and_dtype():
    """Models are built under a meta device and a bf16 default."""
    expected = rope_frequencies(Llama3Rope(), 64, 8192).inv_freq
    kinds = [Rope(), LinearRope(factor=2.0), NtkRope(), DynamicNtkRope(), YarnRope(factor=4.0), Llama3Rope()]
    kinds.append(LongRope(short_factor=(1.0,) * 32, long_factor=(2.0,) * 32))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            under_meta = [rope_frequencies(kind, 64, 8192).inv_freq for kind in kinds]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(inv_freq.device.type == "cpu" and inv_freq.dtype == torch.float32 for inv_freq in under_meta)
    assert torch.equal(under_meta[5], expected)


@pytest.mark.parametrize(
    ("rotary", "head_dim", "message"),
    [
        (Rope(theta=0.0), 16, "theta is 0.0"),
        (Rope(), 15, "head_dim is 15"),
        (LinearRope(factor=0.0), 16, "factor is 0.0"),
        (NtkRope(factor=2.0), 2, "head_dim to 4"),
        (DynamicNtkRope(original_length=0), 16, "original_length is 0"),
        (YarnRope(beta_fast=1.0, beta_slow=32.0), 16, "beta_fast is 1.0"),
        (Llama3Rope(low_freq_factor=4.0), 16, "high_freq_factor is 4.0"),
        (LongRope(short_factor=(1.0,) * 8, long_factor=(1.0,) * 7), 16, "long_factor .* 8 numbers"),
        (LongRope(short_factor=(1.0,) * 7 + (0.0,), long_factor=(1.0,) * 8), 16, "short_factor"),
    ],
)
def test_bad_settings_are_refused_by_name(rotary, head_dim, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(rotary, head_dim, 100)


def test_a_layer_without_rotation_has_no_frequencies():
    with pytest.raises(TypeError, match="must not be rotated"):
        rope_frequencies(NoRotary(), 16, 100)


# ── Rotation ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def llama_rotary():
    """transformers' YaRN rotary embedding for head dim 64, and our equivalent settings."""
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
        },
    )
    return LlamaRotaryEmbedding(config), YarnRope(factor=8.0, original_length=4096)


@pytest.mark.parametrize("batch", [1, 3])
def test_rotation_and_gradients_equal_transformers(llama_rotary, batch):
    torch.manual_seed(0)
    embedding, rotary = llama_rotary
    q_BLNH = torch.randn(3, 50, 4, 64, requires_grad=True)
    k_BLKH = torch.randn(3, 50, 2, 64, requires_grad=True)
    positions_BL = torch.randint(0, 32768, (batch, 50))

    cos, sin = embedding(q_BLNH, positions_BL)
    theirs = apply_rotary_pos_emb(q_BLNH, k_BLKH, cos, sin, unsqueeze_dim=2)
    tables = rope_tables(positions_BL, rope_frequencies(rotary, 64, 32768))
    ours = rotate(q_BLNH, *tables), rotate(k_BLKH, *tables)
    assert tables[0].shape == (batch, 50, 64)

    for x, mine, other in zip((q_BLNH, k_BLKH), ours, theirs, strict=True):
        # A multiply-add rounds once where transformers rounds twice.
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)
        out_grad = torch.randn_like(mine)
        (my_grad,) = torch.autograd.grad(mine, x, out_grad)
        (other_grad,) = torch.autograd.grad(other, x, out_grad)
        torch.testing.assert_close(my_grad, other_grad, rtol=1e-6, atol=1e-6)


def test_low_precision_rotates_in_fp32():
    torch.manual_seed(0)
    tables = rope_tables(torch.arange(40)[None], rope_frequencies(Rope(), 32, 40))
    for dtype in (torch.bfloat16, torch.float16):
        x_BLNH = torch.randn(2, 40, 3, 32).to(dtype)
        rotated = rotate(x_BLNH, *tables)
        assert rotated.dtype == dtype
        assert torch.equal(rotated, rotate(x_BLNH.float(), *tables).to(dtype))


def test_on_a_gpu_one_kernel_rotates_without_a_gradient(monkeypatch):
    """The Triton kernel, interpreted here; what needs a gradient, or has tables for each head, takes PyTorch's operators."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(position_rope, "can_run_triton", lambda *_: True)
    tables = [table.to(device) for table in rope_tables(torch.arange(40)[None], rope_frequencies(Rope(), 32, 40))]
    x_BLNH, by_head = torch.randn(2, 40, 3, 32, device=device), [table[:, :, None] for table in tables]
    found = []
    for needs_gradient, given in ((True, tables), (False, tables), (False, by_head)):
        with torch.set_grad_enabled(needs_gradient), torch.profiler.profile() as profile:
            found.append(rotate(x_BLNH, *given))
        names = {event.key for event in profile.key_averages()}
        assert ("farsight::triton_rotate_by_tables" in names) == (not needs_gradient and given is tables)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[2], found[0])


def test_scores_depend_on_distance_alone():
    torch.manual_seed(0)
    frequencies = rope_frequencies(Rope(), 32, 4096)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float32)

    def score(m, n):
        at = [rope_tables(torch.tensor([[p]]), frequencies) for p in (m, n)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum().item()

    assert score(905, 900) == pytest.approx(score(5, 0), abs=1e-3)
    assert abs(score(5, 0) - score(0, 5)) > 1e-2


def test_each_head_may_have_its_own_frequencies():
    torch.manual_seed(0)
    x_BLNH = torch.randn(2, 9, 2, 16)
    each = [rope_tables(torch.arange(9)[None], rope_frequencies(Rope(theta=theta), 16, 9)) for theta in (1e4, 5e5)]
    cos, sin = (torch.stack([tables[part] for tables in each], dim=2) for part in (0, 1))
    expected = torch.cat([rotate(x_BLNH[:, :, head : head + 1], *each[head]) for head in (0, 1)], dim=2)
    assert torch.equal(rotate(x_BLNH, cos, sin), expected)


def test_traces_into_one_graph():
    frequencies = rope_frequencies(Rope(), 16, 12)

    def turn(x_BLNH, positions_BL):
        return rotate(x_BLNH, *rope_tables(positions_BL, frequencies))

    x_BLNH, positions_BL = torch.randn(2, 12, 2, 16), torch.arange(12)[None]
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x_BLNH, positions_BL), turn(x_BLNH, positions_BL))


# ── Sinusoidal ────────────────────────────────────────────────────────────────────────────────────────


def test_sinusoidal_is_the_formula_at_any_length():
    positions = [[0, 1, 2, 511], [7, 131071, 262143, 16_777_217]]
    ours = sinusoidal_embedding(torch.tensor(positions), 10)
    expected = [
        [
            [(math.sin if d % 2 == 0 else math.cos)(position / 10000 ** ((d - d % 2) / 10)) for d in range(10)]
            for position in row
        ]
        for row in positions
    ]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="dim is 9"):
        sinusoidal_embedding(torch.tensor([[0]]), 9)
