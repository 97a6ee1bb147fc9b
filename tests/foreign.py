"""Tiny models of families that only transformers builds, with random weights, biases and norms, and their directories."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    MptConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    StableLmConfig,
    Starcoder2Config,
)

from farsight.configs.schema import Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer

LENGTH, VOCABULARY, LAYERS, HEADS = 64, 300, 3, 4
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
_FFN = {"intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip

CONFIGS = {
    "phi": PhiConfig(**_COMMON, **_FFN, partial_rotary_factor=0.5),
    "phi_yarn": PhiConfig(
        **_COMMON,
        **_FFN,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt_neox": GPTNeoXConfig(**_COMMON, **_FFN, rotary_pct=0.5),
    "mpt": MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=HEADS, n_layers=LAYERS, max_seq_len=LENGTH),
    "mpt_scaled": MptConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        n_heads=HEADS,
        n_layers=LAYERS,
        max_seq_len=LENGTH,
        attn_config={"softmax_scale": 0.5, "clip_qkv": 1.0},
    ),
    "falcon": FalconConfig(**_COMMON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon_one_key": FalconConfig(**_COMMON, multi_query=True),
    "falcon_alibi": FalconConfig(**_COMMON, multi_query=False, alibi=True),
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=LAYERS, n_head=HEADS, seq_length=LENGTH),
    "stablelm": StableLmConfig(**_COMMON, **_FFN, num_key_value_heads=2),
    "starcoder2": Starcoder2Config(**_COMMON, **_FFN, num_key_value_heads=2, sliding_window=None),
    "window": Starcoder2Config(**_COMMON, **_FFN, num_key_value_heads=2, sliding_window=8),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH),
    "opt": OPTConfig(**_COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "gemma2": Gemma2Config(**_COMMON, **_FFN, num_key_value_heads=2, head_dim=8, sliding_window=8),
    "cohere": CohereConfig(**_COMMON, **_FFN, num_key_value_heads=2),
    "deepseek_v2": DeepseekV2Config(**_COMMON, **_FFN, **_LATENT, q_lora_rank=None),
    "deepseek_v3": DeepseekV3Config(**_COMMON, **_FFN, **_LATENT, q_lora_rank=16, n_group=1, topk_group=1),
}


def write(folder: Path, kind: str, attention: str | None = None) -> PreTrainedModel:
    """Writes a model directory with transformers, and a tokenizer of bytes; returns the model.

    Args:
        attention: transformers' attention function; None takes the model's default.
    """
    generator = torch.Generator().manual_seed(5)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    model.save_pretrained(folder)
    load_tokenizer(Tokenizer(kind="bytes")).save(folder)
    return model
