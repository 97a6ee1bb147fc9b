"""Farsight's own config sections: what a model is, how it knows position, what it reads.

torchtitan's sections (`job`, `training`, `optimizer`, `parallelism`, …) keep their names and meaning;
the sections here stand beside them in the same TOML file. Every class is frozen, and there is one class
for each kind of RoPE, head scope, bias and source, chosen by its `kind`: no class carries another kind's
fields. `configs/load.py` turns TOML and command line into these and refuses what does not fit.

Units: lengths and scopes are tokens; layers and heads count from 0.
"""

from dataclasses import dataclass, field
from typing import Literal

import torchtitan.config as titan

from configs.metrics import Metrics as Metrics

# ── Architecture ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Architecture:
    """Shape of a Llama-style decoder. `model.flavor` fills it from `configs/sizes/<flavor>.toml`."""

    vocab_size: int = 2048
    """Rows of the embedding; 0 takes the tokenizer's own size, rounded up to a multiple of 64."""
    dim: int = 128
    """Model dimension D."""
    n_layers: int = 4
    n_heads: int = 8
    """Query heads N."""
    n_kv_heads: int = 8
    """Key/value heads K; N must be a multiple of it."""
    head_dim: int = 16
    """Head dimension H, even; its own field because N·H need not equal D."""
    ffn_dim: int = 384
    """Hidden dimension of the SwiGLU feed-forward."""
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys before rotation (Qwen3)."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    depth_init: bool = True
    """Scale output projections' initial std by 1/sqrt(2·(layer+1)); false uses 1/sqrt(2·n_layers) for all."""


# ── What rotates: one class a kind ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class NoRotary:
    """Queries and keys are not rotated (NoPE; SCOPE itself)."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class Rope:
    """RoPE (Su et al., 2021): frequency i is theta^(-2i/H)."""

    kind: Literal["rope"] = "rope"
    theta: float = 10000.0


@dataclass(frozen=True)
class LinearRope:
    """Position interpolation (Chen et al., 2023): every frequency divided by `factor`."""

    kind: Literal["linear"] = "linear"
    theta: float = 10000.0
    factor: float = 1.0


@dataclass(frozen=True)
class NtkRope:
    """NTK-aware scaling (bloc97, 2023): theta · factor^(H/(H-2))."""

    kind: Literal["ntk"] = "ntk"
    theta: float = 10000.0
    factor: float = 1.0


@dataclass(frozen=True)
class DynamicNtkRope:
    """Dynamic NTK: theta grows with the sequence once it is longer than `original_length`."""

    kind: Literal["dynamic"] = "dynamic"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 2048


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al., 2023) with its attention factor."""

    kind: Literal["yarn"] = "yarn"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """None: 0.1·ln(factor) + 1."""
    truncate: bool = True
    """Round the correction range to whole dimensions, as the paper's code does."""


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's band-wise scaling."""

    kind: Literal["llama3"] = "llama3"
    theta: float = 500000.0
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al., 2024) with given per-dimension factors, H/2 of each."""

    kind: Literal["longrope"] = "longrope"
    theta: float = 10000.0
    original_length: int = 4096
    short_factor: tuple[float, ...] = ()
    """Used for sequences up to `original_length`."""
    long_factor: tuple[float, ...] = ()
    """Used beyond it."""
    factor: float = 1.0
    """Extended over original length; only the attention factor depends on it."""
    attention_factor: float | None = None
    """None: sqrt(1 + ln(factor) / ln(original_length)), 1 when factor ≤ 1."""


Rotating = Rope | LinearRope | NtkRope | DynamicNtkRope | YarnRope | Llama3Rope | LongRope
Rotary = NoRotary | Rotating


@dataclass(frozen=True)
class Lasp:
    """LASP (Eq. 8–11): layer-wise scale S(l) and base B(l), *replacing* the host RoPE's factor and theta.

    On bare RoPE the scale divides every frequency (Eq. 9); on YaRN, NTK, linear and llama3 it is their factor.
    """

    schedule: Literal["both", "scale", "base"] = "both"
    s_min: float = 1.0
    s_max: float = 16.0
    b_min: float = 500000.0
    b_max: float = 2000000.0
    anchor_layers: int = 8
    """L_anchor: the scale reaches s_max here, and the base starts to grow."""


# ── What a head sees ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Dense:
    """Every head sees every earlier token."""

    kind: Literal["dense"] = "dense"


@dataclass(frozen=True)
class SlidingWindow:
    """Every head sees the last `window` tokens, itself included."""

    kind: Literal["window"] = "window"
    window: int = 4096


@dataclass(frozen=True)
class Scope:
    """SCOPE (Eq. 2–3): head h of H sees ceil(T^(h/H)) tokens, T the longest scope."""

    kind: Literal["scope"] = "scope"
    s_max: int = 0
    """T. 0 follows the stage's training sequence length."""
    scope_max: Literal["trained", "length"] = "trained"
    """Past the trained length: keep T ("trained") or let T grow with the sequence ("length")."""
    layout: Literal["sorted", "interleaved", "group_balanced"] = "interleaved"
    """Which head gets which scope: see `model/scope.py`. Stored with the weights, so it can't be changed later."""


Heads = Dense | SlidingWindow | Scope


@dataclass(frozen=True)
class NoBias:
    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class Alibi:
    """ALiBi (Press et al., 2022): score − slope · distance."""

    kind: Literal["alibi"] = "alibi"
    uniform: bool = False
    """Give all heads the smallest slope (SCOPE appendix B.4)."""


Bias = NoBias | Alibi


@dataclass(frozen=True)
class LayerRule:
    """Replaces a field of `[position]` on the named layers. Later rules win over earlier ones."""

    layers: str = ""
    """Python-style indices, comma separated: "0", "-1", "0:8", "3::4", "0:4,28:"."""
    rotary: Rotary | None = None
    heads: Heads | None = None
    bias: Bias | None = None


@dataclass(frozen=True)
class GarfaLayer:
    """What GARFA learned in a layer."""

    layer: int = 0
    raw: tuple[float, ...] = ()
    """w of each key/value head: alpha = 0.1 + 9.9·sigmoid(w) (GARFA paper, Eq. 13)."""


@dataclass(frozen=True)
class Garfa:
    """A factor on the RoPE base of each key/value head, as fine-tuning learned it."""

    equation: Literal[14, 12] = 14
    """14: the base times the square root of alpha. 12: the base times alpha."""
    queries: bool = False
    """Queries are turned by their group's factor too, and not keys alone."""
    layers: tuple[GarfaLayer, ...] = ()


@dataclass(frozen=True)
class Position:
    """How the model knows position. Rotation, scope and bias are independent, and layers may differ."""

    embedding: Literal["none", "sinusoidal"] = "none"
    """What is added to the token embeddings."""
    rotary: Rotary = field(default_factory=Rope)
    lasp: Lasp | None = None
    heads: Heads = field(default_factory=Dense)
    bias: Bias = field(default_factory=NoBias)
    rules: tuple[LayerRule, ...] = ()
    garfa: Garfa | None = None
    """Written by merging an adapter; training one is `train.py finetune`."""


# ── Data ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tokenizer:
    kind: Literal["auto", "bytes", "sentencepiece", "huggingface"] = "auto"
    """auto: by the files in `path`; without a path, a sentencepiece model trained on the data."""
    path: str = ""
    """A tokenizer file, or a directory with tokenizer.json or tokenizer.model."""
    vocab_size: int = 2048
    """Of a sentencepiece model trained here."""


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """What every source has."""

    weight: float = 1.0
    """Share of the tokens drawn from this source, relative to the other sources' weights."""
    min_tokens: int = 0
    """Leave out documents of fewer tokens, bos and eos not counted; 0 takes all."""
    max_tokens: int = 0
    """Leave out documents of more tokens; 0 takes all."""


@dataclass(frozen=True, kw_only=True)
class StdlibSource(SourceShare):
    """The source files of this Python's standard library: real text, on every machine."""

    kind: Literal["stdlib"] = "stdlib"


@dataclass(frozen=True, kw_only=True)
class TextSource(SourceShare):
    """Plain text files, one document each."""

    kind: Literal["text"] = "text"
    path: str = ""
    """A file, a directory (every *.txt and *.md below it) or a glob."""


@dataclass(frozen=True, kw_only=True)
class JsonlSource(SourceShare):
    """One JSON object a line, one document each."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = ""
    """A file or a glob."""
    field: str = "text"
    """Key of the text."""


@dataclass(frozen=True, kw_only=True)
class ParquetSource(SourceShare):
    """Parquet files, one row a document."""

    kind: Literal["parquet"] = "parquet"
    path: str = ""
    """A file or a glob."""
    field: str = "text"
    """Column of the text."""


@dataclass(frozen=True, kw_only=True)
class HubSource(SourceShare):
    """Any dataset that `datasets.load_dataset` can stream."""

    kind: Literal["huggingface"] = "huggingface"
    name: str = ""
    """A dataset's name, or a format ("json", "parquet", "csv") with `data_files` or `data_dir`."""
    config: str = ""
    split: str = "train"
    data_dir: str = ""
    data_files: str = ""
    """A file or a glob, local or a URL."""
    field: str = "text"
    """Column of the text."""


Source = StdlibSource | TextSource | JsonlSource | ParquetSource | HubSource


@dataclass(frozen=True)
class Data:
    sources: tuple[Source, ...] = (StdlibSource(),)
    seed: int = 0
    """Orders documents and draws sources. The same seed gives the same global batches on any number of ranks."""
    mask_documents: bool = True
    """Tokens see only their own document, and positions restart with it; false lets packed documents see each other."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that can't be read: stop with its file and line, or skip, count and report it."""
    held_out: float = 0.01
    """Share of documents kept for validation, chosen by a hash of the text."""


# ── Training ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Loss:
    chunk_tokens: int = 0
    """Tokens whose logits exist at once; 0 picks a chunk of about 32M logits."""


@dataclass(frozen=True)
class Attention:
    backend: Literal["auto", "reference", "banded", "triton", "flex", "flash"] = "auto"
    """Kernel for scoped attention; "auto" picks by device and says which it took. "triton" needs a GPU, "flex" (PyTorch's
    FlexAttention) a GPU to train, "flash" a GPU, bf16 or fp16, and the package flash-attn."""


@dataclass
class Job(titan.Job):
    config_file: str | None = None
    """TOML file to read; command-line options win over it."""
    dump_folder: str = ""
    """Run folder: everything the run writes goes here. Empty: runs/<config file's name>."""
    description: str = "Farsight"


@dataclass
class Model(titan.Model):
    name: str = "farsight"
    flavor: str = ""
    """A size: the name of a file in configs/sizes/. Empty takes [architecture] as it stands."""
    hf_assets_path: str = ""
    """Not used: the tokenizer is named in [tokenizer], weights to start from in [checkpoint] initial_load_path."""
    converters: list[str] = field(default_factory=list)
    """["quantize.linear.float8"] computes the blocks' linear layers in float8 (GPUs of compute capability 8.9 or more, with
    the package torchao); [quantize.linear.float8] says how they are scaled. Head, embedding and norms stay as they are."""


@dataclass
class Checkpoint(titan.Checkpoint):
    enable: bool = True
    last_save_model_only: bool = False
    """The last checkpoint keeps the optimizer too, so that a finished run can be continued."""
    keep_latest_k: int = 2
    interval: int = 500
    verify: bool = True
    """Compare every file with its checksums before a checkpoint is used; false looks at sizes alone."""
    accept_changes: tuple[Literal["position", "optimizer"], ...] = ()
    """What may differ from the checkpoint that the run resumes from: "position" (anything in [position]), "optimizer" (numbers
    in [optimizer], [lr_scheduler] and fine-tuning's [garfa]). Otherwise such changes are refused."""


@dataclass
class Training(titan.Training):
    tokens: float = 0.0
    """Length of training in tokens; sets `steps` from the global batch size and sequence length. 0 uses `steps`."""
    layers: str = ""
    """Train these layers alone ("0:8", "-8:", as in position.rules); all other parameters stay as they started."""


@dataclass
class Validation(titan.Validation):
    enable: bool = True
    freq: int = 500
    """Steps between validations; one more comes before the first step and one after the last."""
    steps: int = 10
    """Batches of held-out documents, the same ones each time."""
    local_batch_size: int = 0
    """0 takes training.local_batch_size."""
    seq_len: int = 0
    """0 takes training.seq_len."""


@dataclass
class Parallelism(titan.Parallelism):
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"  # type: ignore[assignment]  # torchtitan takes any string
    """Order in which micro-batches pass through the stages. "1F1B" has one stage a rank; the interleaved ones several, and
    less idle time; the zero-bubble ones fill it with weight gradients ("ZBVZeroBubble": two stages a rank, the first and
    the last on the same)."""
    pipeline_parallel_stages_per_rank: int = 0
    """Stages on each rank; 0 takes 1, or 2 where the schedule interleaves. Layers are split over stages by their FLOPs."""
    context_parallel_load_balancer: Literal["zigzag", "contiguous"] = "zigzag"  # type: ignore[assignment]  # torchtitan's values name its own kernels
    """How sequences are cut over context-parallel ranks: "zigzag" gives each a span from the front and one from the back,
    so that all have equally much before theirs; "contiguous" one span, and a little less to exchange."""


@dataclass
class Compile(titan.job_config.Compile):
    components: list[str] = field(default_factory=lambda: ["model"])
    """What `torch.compile` takes; "model" compiles block by block."""


@dataclass(frozen=True)
class DeepSpeed:
    """What `engine = "deepspeed"` shares out; precision, clipping, batches and the optimizer are torchtitan's sections."""

    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO (Rajbhandari et al., 2020): ranks share out the optimizer's state (1), gradients too (2), parameters too (3)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and fp32 weights in host memory, and step there."""
    offload_parameters: bool = False
    """Keep the parameters in host memory; stage 3 only."""


@dataclass
class Debug(titan.Debug):
    seed: int | None = 0
    """Seeds the initial weights."""


@dataclass
class JobConfig(titan.JobConfig):
    """torchtitan's sections with our defaults, and ours beside them."""

    engine: Literal["torchtitan", "deepspeed"] = "torchtitan"
    """What shares out the model and steps: torchtitan (every layout of [parallelism]) or DeepSpeed (ZeRO 1 to 3)."""
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)
    compile: Compile = field(default_factory=Compile)
    parallelism: Parallelism = field(default_factory=Parallelism)
    architecture: Architecture = field(default_factory=Architecture)
    position: Position = field(default_factory=Position)
    attention: Attention = field(default_factory=Attention)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    loss: Loss = field(default_factory=Loss)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)

    @property
    def model_length(self) -> int:
        """Sequence length that the model's positions are made for."""
        return self.training.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return self.lr_scheduler.warmup_steps
