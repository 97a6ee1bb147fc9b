"""Reading and continuing with models that only transformers builds: against transformers itself, and RiPRA on MPT and Phi-2
against their forward passes written out here, in which every query has positions of its own for all keys."""

import dataclasses
import json
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import attach_align_device_hook
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.finetuning import Base
from farsight.configs.schema import Position
from farsight.errors import ConfigError
from farsight.evals.perplexity.__main__ import main as perplexity_main
from farsight.evals.ripra.__main__ import main as ripra_main
from farsight.inference.foreign.load import REMAPPED
from farsight.inference.foreign.model import ForeignModel
from farsight.inference.foreign.rows import ForeignDecoder
from farsight.inference.generate.__main__ import main as generate_main
from farsight.inference.generate.completions import generate
from farsight.inference.loading import load
from farsight.model.adapt.quantized import dequantize
from farsight.model.build import ModelConfig
from tests.foreign import CONFIGS, HEADS, LENGTH, VOCABULARY, write
from tests.inference.test_extensions import logits_of
from tests.inference.test_ripra import relevances, written_out
from tests.model.test_model import SMALL, fresh_model

LIMIT, NEAR, CHUNK = 16, 6, 4
EXACT = f"ripra:limit={LIMIT},near={NEAR},chunk={CHUNK},block=1"
OPTIONS = {
    "device": "cpu", "dtype": None, "quantization": None, "extend": None, "scope_max": None, "chunk": 7,
    "trust_remote_code": False,
}  # fmt: skip


def decoder_of(folder, **options):
    return load(folder, Namespace(**OPTIONS | options)).decoder


def tokens(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(256, (length,), generator=generator) for length in lengths]


def read(decoder, tokens_L):
    return decoder.logits(decoder.hidden_states(tokens_L)[None])[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path, kind):
    """Rows of unequal length, read in chunks and then token by token; and within the limit RiPRA changes nothing."""
    theirs, (long, short, new) = write(tmp_path, kind), tokens(40, 31, 3)
    expected = [theirs(torch.cat([row, new])[None], use_cache=False).logits[0, -4:].detach() for row in (long, short)]
    found = logits_of(decoder_of(tmp_path), [long, short], torch.stack([new, new]))
    assert_close(found, torch.stack(expected), atol=5e-5, rtol=0)
    if theirs.config.model_type in REMAPPED and kind != "window":
        extended = decoder_of(tmp_path, extend=f"ripra:limit={LENGTH},near=8,chunk=4")
        assert_close(logits_of(extended, [long, short], torch.stack([new, new])), found, atol=5e-5, rtol=0)


def test_completions_equal_those_of_transformers(tmp_path):
    theirs, prompts = write(tmp_path, "falcon"), tokens(20, 12)
    opened = load(tmp_path, Namespace(**OPTIONS))
    found = generate(opened.decoder, opened.tokenizer, [p.tolist() for p in prompts], 12, end_tokens=set())
    for prompt, completion in zip(prompts, found, strict=True):
        # The tokenizer's 258 tokens are all that may be written.
        ids = theirs.generate(
            prompt[None],
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=[*range(258, VOCABULARY)],
        )
        assert list(completion.tokens) == ids[0, len(prompt) :].tolist()
    usage = opened.decoder.usage
    assert (
        usage.cache_bytes == 2 * 3 * 2 * (20 + 11) * 2 * 8 * 4
    )  # keys and values, layers, rows, tokens, key heads, fp32
    assert usage.dense_cache_bytes == usage.cache_bytes


# ── RiPRA, written out ────────────────────────────────────────────────────────────────────────────────


def remapped_attention(q_LNH, k_LNH, v_LNH, positions, scores_at):
    """Attention with positions for each query, [L, N, H]; `scores_at(n, q_H, k_TH, P_T)` are a head's scores."""
    out = torch.empty_like(q_LNH)
    for query in range(len(q_LNH)):
        at_T = torch.tensor(positions[query], dtype=torch.float64)
        for n in range(HEADS):
            scores = scores_at(n, q_LNH[query, n], k_LNH[: query + 1, n], at_T)
            out[query, n] = scores.softmax(0) @ v_LNH[: query + 1, n]
    return out


def positions_of(q_LNH, k_LNH):
    """P of every query's keys, from the relevance to it."""
    found = []
    for query in range(len(q_LNH)):
        relevance = relevances(q_LNH[query], k_LNH[: query + 1], query, CHUNK)
        found.append(written_out(relevance, query, LIMIT, NEAR, CHUNK))
    return found


def heads_of(x_LD):
    return x_LD.unflatten(-1, (HEADS, -1))


def mpt_written_out(model, tokens_L):
    """MPT in fp64 (B.4 of the RiPRA paper): −slope · P in place of ALiBi's distance; layers 0 and 1 of 3 are anchors."""
    slopes = [2.0 ** (-8 * (n + 1) / HEADS) for n in range(HEADS)]

    def scores_at(n, q_H, k_TH, at_T):
        return k_TH @ q_H / q_H.numel() ** 0.5 - slopes[n] * at_T

    x = model.transformer.wte.weight[tokens_L]
    positions = None
    for number, block in enumerate(model.transformer.blocks):
        h = F.layer_norm(x, (32,), block.norm_1.weight)
        q, k, v = (heads_of(part) for part in (h @ block.attn.Wqkv.weight.T).chunk(3, dim=-1))
        if number in (0, 1):
            positions = positions_of(q, k)
        x = x + remapped_attention(q, k, v, positions, scores_at).flatten(1) @ block.attn.out_proj.weight.T
        h = F.layer_norm(x, (32,), block.norm_2.weight)
        x = x + F.gelu(h @ block.ffn.up_proj.weight.T) @ block.ffn.down_proj.weight.T
    return F.layer_norm(x, (32,), model.transformer.norm_f.weight) @ model.lm_head.weight.T


def phi_written_out(model, tokens_L):
    """Phi-2 in fp64: parallel blocks with biases; 4 of a head's 8 dimensions are rotated, keys by −P and queries not at all."""

    def scores_at(n, q_H, k_TH, at_T):
        turned = k_TH.clone()
        for i in range(2):
            angle = -at_T * 10000.0 ** (-i / 2)
            turned[:, i] = k_TH[:, i] * angle.cos() - k_TH[:, i + 2] * angle.sin()
            turned[:, i + 2] = k_TH[:, i + 2] * angle.cos() + k_TH[:, i] * angle.sin()
        return turned @ q_H / q_H.numel() ** 0.5

    x = model.model.embed_tokens.weight[tokens_L]
    positions = None
    for number, block in enumerate(model.model.layers):
        h, a = block.input_layernorm(x), block.self_attn
        q, k, v = (heads_of(projection(h)) for projection in (a.q_proj, a.k_proj, a.v_proj))
        if number in (0, 1):
            positions = positions_of(q, k)
        x = x + a.dense(remapped_attention(q, k, v, positions, scores_at).flatten(1)) + block.mlp(h)
    return model.lm_head(model.model.final_layernorm(x))


@pytest.mark.parametrize(("kind", "by_hand"), [("mpt", mpt_written_out), ("phi", phi_written_out)], ids=["mpt", "phi"])
def test_ripra_equals_a_brute_force(tmp_path, kind, by_hand):
    """90 tokens, past the trained 64 too: a prompt of 80 read in chunks, and tokens decoded after it."""
    model, (tokens_L,) = write(tmp_path, kind).double(), tokens(90)
    with torch.no_grad():
        expected = by_hand(model, tokens_L)
    decoder = decoder_of(tmp_path, extend=EXACT)
    assert_close(read(decoder, tokens_L).double(), expected, atol=5e-5, rtol=0)
    decoded = logits_of(decoder, [tokens_L[:80]], tokens_L[None, 80:])[0]
    assert_close(decoded.double(), expected[79:], atol=5e-5, rtol=0)
    with torch.no_grad():  # and it is another result than without positions of its own
        plain = model(tokens_L[None, :LENGTH]).logits[0]
    assert (expected[LENGTH - 1] - plain[-1]).abs().max() > 0.1


@pytest.mark.parametrize("method", ["self_extend", "chunk_llama", "adagrope", "gali"])
def test_other_methods_leave_the_window_as_it_is(tmp_path, method):
    theirs, (tokens_L,) = write(tmp_path, "phi"), tokens(LENGTH)
    with torch.no_grad():
        expected = theirs(tokens_L[None]).logits[0]
    decoder = decoder_of(tmp_path, extend=method)
    assert_close(read(decoder, tokens_L), expected, atol=5e-5, rtol=0)
    assert read(decoder, torch.cat([tokens_L, tokens_L])).isfinite().all()


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [("dtype", "bfloat16", 0.03), ("quantization", "int8", 0.05), ("quantization", "nf4", 0.5)],
)
def test_rounded_weights(tmp_path, monkeypatch, name, kind, error):
    """The relative error of logits is that of the numbers, and the projections of every block are bitsandbytes' layers."""
    monkeypatch.setitem(
        CONFIGS,
        "wide",
        type(CONFIGS["phi"])(**{**CONFIGS["phi"].to_dict(), "hidden_size": 64, "intermediate_size": 128}),
    )
    theirs, (tokens_L,) = write(tmp_path, "wide"), tokens(30)
    with torch.no_grad():
        expected = theirs(tokens_L[None]).logits[0]
    for extend in (None, "ripra:limit=48,near=8"):
        decoder = decoder_of(tmp_path, extend=extend, **{name: kind})
        difference = (read(decoder, tokens_L) - expected).norm() / expected.norm()
        assert error / 100 < difference < error
    kinds = {type(m).__module__.split(".")[0] for n, m in decoder.foreign.model.named_modules() if n.endswith("q_proj")}
    assert kinds == {"torch" if name == "dtype" else "bitsandbytes"}
    assert {layer.rotary.kind for layer in decoder.config.layers()} == {"rope"}


def test_modules_that_accelerate_has_wrapped(tmp_path):
    """On several devices, each module's forward is replaced by one that moves its inputs."""
    for kind in ("mpt", "phi"):
        theirs, (tokens_L,) = write(tmp_path / kind, kind), tokens(30)
        with torch.no_grad():
            expected = theirs(tokens_L[None]).logits[0]
        attach_align_device_hook(theirs, execution_device=torch.device("cpu"))
        assert hasattr(
            theirs.get_submodule("transformer.blocks.0.attn.out_proj" if kind == "mpt" else "lm_head"), "_hf_hook"
        )
        foreign = ForeignModel(theirs, kind)
        assert_close(read(ForeignDecoder(foreign, foreign.config, chunk=7), tokens_L), expected, atol=5e-5, rtol=0)
        rows = ForeignDecoder(foreign, foreign.config, chunk=7).start([30])
        for _ in rows.chunks(tokens_L[None]):
            pass
        assert rows.nbytes == rows.dense_nbytes


# ── Commands and refusals ─────────────────────────────────────────────────────────────────────────────


def test_commands(tmp_path, capsys):
    write(tmp_path / "mpt", "mpt")
    text = tmp_path / "text.txt"
    text.write_text("The score grows with the position of the key, so the late keys win. " * 4)
    folder, extend = str(tmp_path / "mpt"), ["--extend", f"ripra:limit={LIMIT},chunk=8"]
    generate_main(
        [folder, "--prompt-file", str(text), "--new-tokens", "5", "--json", str(tmp_path / "g.json"), *extend]
    )
    (completion,) = json.loads((tmp_path / "g.json").read_text())["completions"]
    assert completion["prompt_tokens"] > LENGTH
    assert len(completion["tokens"]) == 5
    for more in ([], extend):
        perplexity_main(
            [folder, "--data", str(text), "--lengths", "16", "60", "--json", str(tmp_path / "p.json"), *more]
        )
        found = json.loads((tmp_path / "p.json").read_text())["lengths"]
        rows = torch.tensor(list(text.read_bytes()))
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mpt")
            windows = rows[: len(rows) // 16 * 16].view(-1, 16)
            loss = F.cross_entropy(theirs(windows).logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        if not more:
            assert found["16"] == pytest.approx(float(loss.exp()), rel=1e-4)
    ripra_main([folder, "--data", str(text), "--length", "100", "--json", str(tmp_path / "r.json"), *extend])
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["anchors"] == [0, 1]
    assert result["settings"]["limit"] == LIMIT
    assert result["blocks"]["logits"]["mean"] > 0


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("deepseek_v2", {"extend": "ripra"}, r"models of type 'deepseek_v2' .* not known here; .* mpt \(ALiBi\), phi \(partial"),
        ("phi", {"config": {"model_type": "gptj"}}, "'gptj', which does not go through .* are bloom, falcon, mpt"),
        ("phi", {"config": {"model_type": "gptj"}, "extend": "ripra"}, "'gptj', which does not go through"),
        ("window", {"extend": "ripra"}, "a head of layer 0 sees 8 tokens"),
        ("phi", {"scope_max": "length"}, "no head of .* has a scope"),
        ("phi", {"extend": "yarn:2"}, "this method changes frequencies of models that Farsight builds"),
        ("phi", {"extend": "ripra:limit=65"}, "limit = 65 must be 2 to 64"),
        ("phi", {"remove": "model.safetensors"}, "Other weight formats"),
        ("phi", {"lose": "model.layers.1.mlp.fc1.weight"}, r"lacks model\.layers\.1\.mlp\.fc1\.weight"),
        ("phi", {"config": {"model_type": "unheard_of"}}, "transformers can't load it"),
        ("phi", {"config": {"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "m.M"}}}, "--trust-remote-code"),
        ("phi", {"config": {"num_hidden_layers": 4}}, "lacks model.layers.3"),
        ("phi", {"config": {"intermediate_size": 50}}, "another shape|can't load"),
    ],
)  # fmt: skip
def test_refused(tmp_path, kind, options, words):
    from safetensors.torch import load_file, save_file

    write(tmp_path, kind)
    options = dict(options)
    file = tmp_path / "model.safetensors"
    if options.pop("remove", None):
        file.rename(tmp_path / "pytorch_model.bin")
    if lost := options.pop("lose", None):
        save_file({n: x for n, x in load_file(file).items() if n != lost}, file, metadata={"format": "pt"})
    if change := options.pop("config", None):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=words):
        decoder_of(tmp_path, **options)


def test_quantised_weights_stay_in_one_process(tmp_path):
    config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), Position(), trained_length=48)
    write_model_dir(tmp_path / "own", config, fresh_model(config).state_dict())
    write(tmp_path / "phi", "phi")
    for folder, words in (("own", "--quantization keeps a model in one process"), ("phi", "can't be divided over")):
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / folder, Namespace(**OPTIONS | {"quantization": "nf4"}), divide=print)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_lengths_past_a_table_of_positions_are_refused_before_reading(tmp_path, kind, monkeypatch):
    """GPT-2 has a row for each of its 64 positions, OPT two more that nothing uses."""
    write(tmp_path / kind, kind)
    text = tmp_path / "text.txt"
    text.write_text("The late keys win. " * 8)
    reads, hidden_states = [], ForeignModel.hidden_states

    def counted(model, tokens, *rest):
        reads.append(tokens.shape[1])
        return hidden_states(model, tokens, *rest)

    monkeypatch.setattr(ForeignModel, "hidden_states", counted)
    words = r"can't read 65 tokens: .* for each of 64 positions .* at most 64"
    with pytest.raises(SystemExit, match=words):
        perplexity_main([str(tmp_path / kind), "--data", str(text), "--lengths", "32", "65"])
    opened = load(tmp_path / kind, Namespace(**OPTIONS))
    prompts = [[70] * 10, [70] * 60]
    with pytest.raises(ConfigError, match=words):
        generate(opened.decoder, opened.tokenizer, prompts, 5)
    with pytest.raises(ConfigError, match=words):
        opened.decoder.hidden_states(torch.arange(65))
    assert all(length <= 4 for length in reads)  # those that find out what the layers are
    for completion in generate(opened.decoder, opened.tokenizer, prompts, 4, end_tokens=set()):
        assert len(completion.tokens) == 4


def test_four_bits_keep_their_packing_on_every_cpu(tmp_path):
    """Layers of 32 inputs and 48 outputs: bitsandbytes can't repack them for AVX512-BF16, and must not try."""
    theirs = write(tmp_path, "phi").float()
    decoder = decoder_of(tmp_path, quantization="nf4")
    assert not any(getattr(m, "support_avx512bf16_for_cpu", False) for m in decoder.module.modules())
    (tokens_L,) = tokens(20)
    found = read(decoder, tokens_L)
    with torch.no_grad():
        for name, module in theirs.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(dequantize(module.weight, Base(quantization="nf4", dtype="float32")))
        assert_close(found, theirs(tokens_L[None]).logits[0], atol=1e-3, rtol=0)
