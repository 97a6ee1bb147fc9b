"""The model card (README.md) of a model directory: the model, how it was trained, and how to load it.

`farsight.json` has an entry for each run that trained the weights, oldest first; the card is written from them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.configs.finetuning import FinetuneConfig, InstructionHub
from farsight.configs.schema import HubSource, JobConfig, NoRotary, Source, StdlibSource
from farsight.configs.typed import to_dict
from farsight.data.sources.streamed import folders_of
from farsight.errors import ConfigError
from farsight.json_files import fields_of, read_object
from farsight.model.adapt.layers import adapted
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.layers import describe, layer_selection
from farsight.model.position.scope import DENSE_SCOPE

CARD = "README.md"
CONFIG = "farsight.json"


def training_entry(config: JobConfig, steps: int, tokens: int) -> dict[str, Any]:
    """A run's entry in the history of its weights, after the given number of steps and tokens."""
    o = config.optimizer
    start = config.base_model.path if isinstance(config, FinetuneConfig) else config.checkpoint.initial_load_path
    return {
        "name": config.job.description if config.job.description != "Farsight" else Path(config.job.dump_folder).name,
        "start": start or "random weights",
        "layers": config.training.layers or "all",
        "seq_len": config.training.seq_len,
        "steps": steps,
        "tokens": tokens,
        "dtype": config.base_model.dtype if isinstance(config, FinetuneConfig) else config.training.mixed_precision_param,
        "optimizer": {
            "name": o.title, "lr": o.lr, "beta1": o.beta1, "beta2": o.beta2, "weight_decay": o.weight_decay,
            "warmup_steps": config.warmup_steps, "decay": config.lr_scheduler.decay_type,
            "min_lr_factor": config.lr_scheduler.min_lr_factor,
            **({"garfa_lr": config.garfa.lr} if isinstance(config, FinetuneConfig) and config.garfa.enable else {}),
        },
        "data": _instructions(config) if isinstance(config, FinetuneConfig) else _mixture(config),
        **({"adapter": adapter_entry(config)} if isinstance(config, FinetuneConfig) else {}),
    }  # fmt: skip


def adapter_entry(config: FinetuneConfig) -> dict[str, Any]:
    """The adapters of a run and the precision of its base; a resuming run must have the same."""
    layers = adapted(config)
    lora, garfa = config.lora, config.garfa
    entry: dict[str, Any] = {name: value for name, value in to_dict(config.base_model).items() if name != "path"}
    if layers.lora:
        entry["lora"] = to_dict(lora) | {"layers": list(layers.lora)}
    if layers.garfa:
        settings = {"init": garfa.init, "equation": garfa.equation, "queries": garfa.queries}
        entry["garfa"] = settings | {"layers": list(layers.garfa)}
    return entry


def _mixture(config: JobConfig) -> list[dict[str, Any]]:
    total = sum(source.weight for source in config.data.sources)
    return [{"source": _source(source), "share": source.weight / total} for source in config.data.sources]


def _instructions(config: FinetuneConfig) -> list[dict[str, Any]]:
    """Sources with their passes per epoch: their shares of tokens depend on their rows."""
    sources = []
    for source in config.data.sources:
        rows = f"{source.rows:,} rows of " * bool(source.rows)
        name = _hub_name(source) if isinstance(source, InstructionHub) else source.path
        sources.append({"source": rows + name, "passes": source.weight})
    return sources


def _source(source: Source) -> str:
    match source:
        case StdlibSource():
            name = "Python's standard library"
        case HubSource():
            name = _hub_name(source)
        case _:
            name = getattr(source, "path", source.kind)
    if source.min_tokens:
        name += f", documents of {source.min_tokens:,} tokens or more"
    if source.max_tokens:
        name += f", documents of {source.max_tokens:,} tokens or fewer"
    return name


def _hub_name(source: HubSource | InstructionHub) -> str:
    parts = (source.name, source.config, ", ".join(folders_of(source)), source.data_files)
    return " ".join(part for part in parts if part)


def read_history(directory: Path) -> list[dict[str, Any]]:
    """The runs that trained the weights of a checkpoint or model directory; empty if that is unknown.

    Raises:
        ConfigError: a damaged file.
    """
    path = directory / CONFIG
    return checked_history(read_object(path).get("training", []), path) if path.is_file() else []


def checked_history(history: Any, path: Path) -> list[dict[str, Any]]:
    """Checks the history read from a file.

    Raises:
        ConfigError: cards and reports can't be written from it.
    """
    with fields_of(path):
        try:
            training_rows(history)
        except ValueError as error:
            raise ConfigError(f"{path}: its history of training is damaged ({error}).") from error
    return list(history)


def shape_text(config: ModelConfig) -> str:
    """Sizes of a model, and what makes it differ from a Llama, on one line."""
    a, position = config.architecture, config.position
    heads = f"{a.n_heads} heads of {a.head_dim}" + f", {a.n_kv_heads} for keys and values" * (a.n_kv_heads != a.n_heads)
    unit = {"silu": "SwiGLU", "gelu_tanh": "GeGLU"}[a.activation]
    scaling = position.query_scaling
    return ", ".join(
        text
        for text, holds in {
            f"{a.n_layers} layers of dimension {a.dim:,}, {heads}, {unit} of {a.ffn_dim:,}": True,
            f"{a.vocab_size:,} tokens in the vocabulary": True,
            "norms after attention and feed-forward": a.norm_placement == "post",
            "norms before and after attention and feed-forward": a.norm_placement == "sandwich",
            f"queries and keys normalised{' over all heads' * (a.qk_norm_span == 'projection')}": a.qk_norm,
            "biases of queries, keys and values": a.attention_bias == "qkv",
            "biases of attention": a.attention_bias == "all",
            "biases of the feed-forward": a.mlp_bias,
            f"{a.rotated_dim} dimensions of each head that rotate": a.rotated_dim != a.head_dim,
            f"scores scaled by {a.softmax_scale or 0:.4g}": a.softmax_scale is not None,
            "queries that grow with their position": scaling is not None,
            "scaled embeddings": a.scaled_embeddings,
            "embedding and head tied": a.tie_embeddings,
            "sinusoidal positions added to the embedding": position.embedding == "sinusoidal",
        }.items()
        if holds
    )


def model_card(
    name: str, config: ModelConfig, hf_config: dict[str, Any], history: Sequence[dict[str, Any]], tokenizer: bool
) -> str:
    """The card's text.

    Args:
        name: name of the model, used if its history has none or it was grafted.
        hf_config: content of `config.json`.
        tokenizer: whether the directory has a tokenizer that `transformers` can read.
    """
    own_type = hf_config["model_type"] == "farsight"
    title = history[-1]["name"] if history and "grafted" not in history[-1] else name
    options = 'dtype="auto", trust_remote_code=True' if own_type else 'dtype="auto"'
    kind = "Llama-style language model" if own_type else f"language model (`{hf_config['architectures'][0]}`)"
    lines = [
        *heading(title, "transformers", _mechanisms(config)),
        f"A {kind} of {count_parameters(config):,} parameters for sequences of up to "
        f"{config.trained_length:,} tokens{', trained with Farsight' * bool(history)}.\n",
        "## What it is\n",
        f"{shape_text(config)}.",
        "How each layer knows position (scopes: how many tokens back its heads see, the token itself included):\n",
        f"```\n{describe(config.layers())}\n```\n",
        *_past_the_trained_length(config),
        *_garfa(config),
        "## How it was trained\n",
        *training_table(history),
        "## How to load it\n",
        *_needs(hf_config),
        "```python",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' * tokenizer}\n",
        'path = "."  # this directory, or its name on a hub',
        f"model = AutoModelForCausalLM.from_pretrained(path, {options})",
    ]
    if tokenizer:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained(path{', trust_remote_code=True' * own_type})",
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
        ]
    lines += ["```\n", "`farsight.json` holds the full configuration."]
    return "\n".join(lines) + "\n"


def _needs(hf_config: dict[str, Any]) -> list[str]:
    if "requires" not in hf_config:
        oldest = hf_config["transformers_version"].removesuffix(".0")
        kind = hf_config["architectures"][0]
        return [
            f"Needs `transformers` {oldest} or later, for `{kind}`; before 4.56, `dtype` is called `torch_dtype`.\n"
        ]
    needs = " and ".join(f"`{package}` {version}" for package, version in hf_config["requires"].items())
    oldest, newest = hf_config["tested_with_transformers"]
    return [
        f"`modeling_farsight.py` in this directory needs {needs}, and nothing else. It is tested with transformers {oldest} and "
        f"{newest}; before 4.56, `dtype` is called `torch_dtype`.\n"
    ]


def heading(title: str, library: str, tags: Sequence[str], base_model: str | None = None) -> list[str]:
    """The metadata that hubs read, and the title; `base_model` is ORG/NAME of an adapter's base."""
    from huggingface_hub import ModelCardData

    tags = ["farsight", *tags]
    data = ModelCardData(library_name=library, pipeline_tag="text-generation", tags=tags, base_model=base_model)
    return [f"---\n{data.to_yaml()}\n---\n", f"# {title}\n"]


def _mechanisms(config: ModelConfig) -> list[str]:
    """The position mechanisms of the layers, as tags for a hub's search."""
    sinusoidal = config.position.embedding == "sinusoidal"
    names: set[str] = {"sinusoidal"} if sinusoidal else set()
    for layer in config.layers():
        windows = {*layer.scopes} - {DENSE_SCOPE}
        kinds: set[str] = set() if isinstance(layer.rotary, NoRotary) else {layer.rotary.kind}
        kinds |= {"lasp"} if kinds and config.position.lasp else set()
        kinds |= {"garfa"} if layer.garfa else set()
        kinds |= {layer.bias.kind} if layer.bias else set()
        kinds |= {"scope" if len({*layer.scopes}) > 1 else "window"} if windows else set()
        names |= kinds or (set() if sinusoidal else {"nope"})
    return sorted(names)


def _past_the_trained_length(config: ModelConfig) -> list[str]:
    layers = config.layers()
    if any(layer.scope_ranks for layer in layers):
        return ["Past the trained length, scopes grow with the sequence.\n"]
    if any(len({*layer.scopes}) > 1 for layer in layers):
        return ["Past the trained length, scopes stay as they are.\n"]
    return []


def _garfa(config: ModelConfig) -> list[str]:
    layers = [number for number, layer in enumerate(config.layers()) if layer.garfa]
    if not layers or config.position.garfa is None:
        return []
    base = "the square root of alpha" if config.position.garfa.equation == 14 else "alpha"
    what = "Keys and queries" if config.position.garfa.queries else "Keys, but not queries,"
    return [
        f"{what} rotate at frequencies of their own in each key/value head of layers {layer_selection(layers)}: the RoPE base "
        f"is multiplied by {base} (GARFA). Software that ignores GARFA computes a different model.\n"
    ]


def training_table(history: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table with one line per run."""
    if not history:
        return ["How these weights were trained is not recorded here.\n"]
    return markdown_table(training_rows(history))


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; the first row is the header."""
    header, *lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return [header, "|---" * len(rows[0]) + "|", *lines, ""]


def training_rows(history: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A header row, and the cells of each run."""
    rows = [["", "starts from", "sequence", "steps", "tokens a step", "tokens", "layers", "optimizer", "data"]]
    for entry in history:
        o = entry["optimizer"]
        optimizer = (
            f"{o['name']} ({o['beta1']}, {o['beta2']}), weight decay {o['weight_decay']}, learning rate {o['lr']:g}, "
            f"warm-up {o['warmup_steps']:,}, {o['decay']} decay to {o['min_lr_factor']:g} of it"
            f"{', GARFA ' + format(o['garfa_lr'], 'g') if 'garfa_lr' in o else ''}; {entry['dtype']}"
        )
        data = "; ".join(_amount(source) + source["source"] for source in entry["data"])
        rows.append([
            entry["name"], entry["start"], f"{entry['seq_len']:,}", f"{entry['steps']:,}",
            f"{entry['tokens'] // max(1, entry['steps']):,}", f"{entry['tokens']:,}", _trained(entry), optimizer, data,
        ])  # fmt: skip
    return rows


def _amount(source: dict[str, Any]) -> str:
    if "share" in source:
        return f"{100 * source['share']:.3g} % "
    return f"{source['passes']:g} × " if source["passes"] != 1 else ""


def _trained(entry: dict[str, Any]) -> str:
    """Table cell: what a run trained, and what its weights were grafted with afterwards."""
    grafted = entry.get("grafted")
    return _trained_parts(entry) + (f"; then grafted: {grafted}" if grafted else "")


def _trained_parts(entry: dict[str, Any]) -> str:
    adapter = entry.get("adapter", {})
    parts = []
    if lora := adapter.get("lora"):
        parts.append(f"{lora_size(lora)} on {layer_selection(lora['layers'])}")
    if garfa := adapter.get("garfa"):
        parts.append(f"GARFA on {layer_selection(garfa['layers'])}")
    if not parts:
        return entry["layers"]
    kept = adapter["quantization"] if adapter["quantization"] != "none" else adapter["dtype"]
    parts.append(f"base in {kept}")
    if merged := entry.get("merged"):
        into = {"dequantized": "these weights, read back", "original": "the base's own weights"}[merged["into"]]
        parts.append(f"merged into {into}" + ", without GARFA" * (merged["garfa"] == "dropped"))
    return "; ".join(parts)


def lora_size(lora: dict[str, Any]) -> str:
    """The kind, rank and alpha of an adapter's LoRA."""
    kind = "DoRA" if lora["dora"] else "rsLoRA" if lora["rslora"] else "LoRA"
    return f"{kind} of rank {lora['rank']}, alpha {lora['alpha']:g}"
