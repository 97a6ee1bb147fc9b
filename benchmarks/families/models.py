"""A tiny random `transformers` model of each family that we read and write: all biases, norms and windows matter."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 320, 40
"""`LENGTH` is longer than the windows, and than the lengths that YaRN and LongRoPE start from."""
_WINDOW, _ORIGINAL = 8, 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""4 heads of 16 are 64 dimensions, unlike the model's 48."""
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": _ORIGINAL,
    "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
_LOCAL_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {
        "attention_bias": True, "mlp_bias": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": _ORIGINAL,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    }),
    "mistral": ("Mistral", {"sliding_window": _WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "mistral-v0.3": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.5}}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": _WINDOW, "layer_types": _LOCAL_AND_FULL}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 3}),
    "phi3": ("Phi3", {
        # Its config derives the number of factors from hidden_size / num_attention_heads.
        "hidden_size": 64, "head_dim": None, "sliding_window": 24, "original_max_position_embeddings": _ORIGINAL,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        },
    }),
    "olmo2": ("Olmo2", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "olmo3": ("Olmo3", {
        "sliding_window": _WINDOW, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}, "full_attention": _YARN | {"rope_theta": 20000.0},
        },
    }),
    "gemma3": ("Gemma3", {
        "tie_word_embeddings": True, "sliding_window": _WINDOW, "query_pre_attn_scalar": 24, "layer_types": _LOCAL_AND_FULL,
        "attention_bias": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
        },
    }),
}  # fmt: skip
"""By name, `transformers`' prefix of the classes and the config's settings beside `_SIZES`."""


VISION = {"mistral3": "ministral3", "gemma3-vision": "gemma3"}
"""Models that read images too, and the family of their language model."""


def hf_vision_model(name: str) -> Any:
    """A model of `VISION`, as `hf_model`; it reads text alone here."""
    import transformers

    text, settings = hf_model(VISION[name]).config, {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4, **settings}
    if name == "mistral3":
        config = transformers.Mistral3Config(
            text_config=text,
            vision_config=transformers.PixtralVisionConfig(**sizes, head_dim=16),
            tie_word_embeddings=False,
        )
        model: Any = transformers.Mistral3ForConditionalGeneration(config)
    else:
        config = transformers.Gemma3Config(
            text_config=text, vision_config=transformers.SiglipVisionConfig(**sizes), mm_tokens_per_image=4
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    randomise(model)
    return model.eval()


def hf_model(name: str, **changes: Any) -> Any:
    """The family's `transformers` model in fp32, evaluation mode, attending eagerly; every parameter is random."""
    import transformers

    prefix, settings = FAMILIES[name]
    values = {
        key: value
        for key, value in (_SIZES | settings | changes).items()
        if value is not None or key == "sliding_window"
    }
    # A config fills in the tables that it is given.
    values = {key: _copied(value) for key, value in values.items()}
    config_class = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**values, attn_implementation="eager"))
    randomise(model)
    return model.eval()


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Fills all parameters so that none could be left out unnoticed; norms vary around 1, or 0 where the norm adds 1."""
    generator = torch.Generator().manual_seed(0)
    zero_centered = "Gemma" in type(model).__name__
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(0.0 if zero_centered else 1.0, 0.3, generator=generator)
        else:
            parameter.normal_(
                0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5 * 1.5, generator=generator
            )


def write_hf(name: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Writes the family's model directory as `transformers` does, and returns its model."""
    model = hf_model(name, **changes).to(dtype)
    model.save_pretrained(directory)
    return model


def tokens(rows: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random ids [rows, length] without the special ones."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
