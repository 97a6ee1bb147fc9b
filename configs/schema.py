"""Farsight's own config sections: architecture, positions, tokenizer and data; and `JobConfig`, which holds all sections.

Options that mean the same as torchtitan's have its names (`job`, `training`, `parallelism`, …). Each kind of RoPE, head
scope, bias and source has a class of its own, selected by `kind`, so no class carries another kind's
fields. `configs/load.py` reads them from TOML and the command line; `configs/typed.py` builds
them and refuses what does not fit.
A number's range is declared with its type (`farsight/ranges.py`).

Units: lengths and scopes are tokens; layers and heads count from 0.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from farsight.configs.checkpointing import Checkpoint as Checkpoint
from farsight.configs.evaluations import Evaluation as Evaluation
from farsight.configs.metrics import Metrics as Metrics
from farsight.configs.optimizers import AdamW as AdamW
from farsight.configs.optimizers import Optimizer as Optimizer
from farsight.configs.parallelism import Comm as Comm
from farsight.configs.parallelism import DeepSpeed as DeepSpeed
from farsight.configs.parallelism import Parallelism as Parallelism
from farsight.configs.training import ActivationCheckpoint as ActivationCheckpoint
from farsight.configs.training import Attention as Attention
from farsight.configs.training import Compile as Compile
from farsight.configs.training import Debug as Debug
from farsight.configs.training import Job as Job
from farsight.configs.training import Loss as Loss
from farsight.configs.training import LRScheduler as LRScheduler
from farsight.configs.training import Model as Model
from farsight.configs.training import Profiling as Profiling
from farsight.configs.training import Quantize as Quantize
from farsight.configs.training import Training as Training
from farsight.configs.training import Validation as Validation
from farsight.ranges import Count, Dim, PartialShare, Positive, Range, Size
from farsight.stores import path_of

# ── Architecture ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Architecture:
    """Shape of a Llama-style decoder. `model.flavor` fills it from `configs/sizes/<flavor>.toml`."""

    vocab_size: Annotated[int, Range(least=0, most=2**24)] = 2048
    """Rows of the embedding; 0 takes the tokenizer's size, rounded up to a multiple of 64."""
    dim: Dim = 128
    """Model dimension D."""
    n_layers: Annotated[int, Range(least=1, most=10_000)] = 4
    n_heads: Dim = 8
    """Query heads N."""
    n_kv_heads: Dim = 8
    """Key/value heads K; N must be a multiple of it."""
    head_dim: Dim = 16
    """Head dimension H, even; a separate field because N·H need not equal D."""
    ffn_dim: Dim = 384
    """Hidden dimension of the gated feed-forward."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The gate's activation: SwiGLU, or GeGLU with the tanh approximation of GELU (Gemma)."""
    norm_eps: Positive = 1e-5
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """RMSNorm of what attention and feed-forward read (pre: Llama), of what they add to the residual stream (post: Olmo 2),
    or of both (sandwich: Gemma 3)."""
    zero_centered_norms: bool = False
    """RMSNorm multiplies by 1 + weight, and weights start at 0 (Gemma)."""
    qk_norm: bool = False
    """RMSNorm of queries and keys before rotation."""
    qk_norm_span: Literal["head", "projection"] = "head"
    """Normalise each head on its own (Qwen3), or all heads of a projection together (Olmo 2)."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the attention's projections: of queries, keys and values (Qwen2), or of the output too."""
    mlp_bias: bool = False
    """Biases of the feed-forward's projections."""
    rotary_dim: Count = 0
    """Dimensions of each head that rotate, its first ones; 0 rotates all of them."""
    softmax_scale: Positive | None = None
    """Scores are multiplied by it before the softmax; None is 1/sqrt(head_dim)."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    scaled_embeddings: bool = False
    """Multiply the token embeddings by sqrt(dim), rounded to the weights' dtype (Gemma)."""
    depth_init: bool = True
    """Scale output projections' initial std by 1/sqrt(2·(layer+1)); false uses 1/sqrt(2·n_layers) for all."""

    @property
    def rotated_dim(self) -> int:
        """Dimensions of each head that rotate in layers with RoPE."""
        return self.rotary_dim or self.head_dim


# ── Rotary embeddings, one class per kind ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class NoRotary:
    """Queries and keys are not rotated (NoPE; SCOPE itself)."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class Rope:
    """RoPE (Su et al., 2021): frequency i is theta^(-2i/H)."""

    kind: Literal["rope"] = "rope"
    theta: Positive = 10000.0


@dataclass(frozen=True)
class LinearRope:
    """Position interpolation (Chen et al., 2023): every frequency divided by `factor`."""

    kind: Literal["linear"] = "linear"
    theta: Positive = 10000.0
    factor: Positive = 1.0


@dataclass(frozen=True)
class NtkRope:
    """NTK-aware scaling (bloc97, 2023): theta · factor^(H/(H-2))."""

    kind: Literal["ntk"] = "ntk"
    theta: Positive = 10000.0
    factor: Positive = 1.0


@dataclass(frozen=True)
class DynamicNtkRope:
    """Dynamic NTK: theta grows with the sequence once it is longer than `original_length`."""

    kind: Literal["dynamic"] = "dynamic"
    theta: Positive = 10000.0
    factor: Positive = 1.0
    original_length: Size = 2048


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al., 2023) with its attention factor."""

    kind: Literal["yarn"] = "yarn"
    theta: Positive = 10000.0
    factor: Positive = 1.0
    original_length: Size = 2048
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    """None: 0.1·ln(factor) + 1."""
    truncate: bool = True
    """Round the correction range to whole dimensions, as the paper's code does."""


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's band-wise scaling."""

    kind: Literal["llama3"] = "llama3"
    theta: Positive = 500000.0
    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_length: Size = 8192


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al., 2024) with given per-dimension factors: H/2 short and H/2 long ones."""

    kind: Literal["longrope"] = "longrope"
    theta: Positive = 10000.0
    original_length: Size = 4096
    short_factor: tuple[Positive, ...] = ()
    """Used for sequences up to `original_length`."""
    long_factor: tuple[Positive, ...] = ()
    """Used for longer sequences."""
    factor: Positive = 1.0
    """Extended length over original length; only the attention factor depends on it."""
    attention_factor: Positive | None = None
    """None: sqrt(1 + ln(factor) / ln(original_length)), 1 when factor ≤ 1."""


Rotating = Rope | LinearRope | NtkRope | DynamicNtkRope | YarnRope | Llama3Rope | LongRope
Rotary = NoRotary | Rotating


@dataclass(frozen=True)
class Lasp:
    """LASP (Eq. 8–11): layer-wise scale S(l) and base B(l), *replacing* the host RoPE's factor and theta.

    On bare RoPE the scale divides every frequency (Eq. 9); on YaRN, NTK, linear and llama3 it is their factor.
    """

    schedule: Literal["both", "scale", "base"] = "both"
    s_min: Positive = 1.0
    s_max: Positive = 16.0
    b_min: Positive = 500000.0
    b_max: Positive = 2000000.0
    anchor_layers: Size = 8
    """L_anchor: the scale reaches s_max here, and the base starts to grow."""


# ── Head scopes and biases ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Dense:
    """Every head sees every earlier token."""

    kind: Literal["dense"] = "dense"


@dataclass(frozen=True)
class SlidingWindow:
    """Every head sees the last `window` tokens, the current one included."""

    kind: Literal["window"] = "window"
    window: Size = 4096


@dataclass(frozen=True)
class Scope:
    """SCOPE (Eq. 2–3): head h of H sees ceil(T^(h/H)) tokens, T the longest scope."""

    kind: Literal["scope"] = "scope"
    s_max: Count = 0
    """T. 0 follows the stage's training sequence length."""
    scope_max: Literal["trained", "length"] = "trained"
    """Past the trained length: keep T ("trained") or let T grow with the sequence ("length")."""
    layout: Literal["sorted", "interleaved", "group_balanced"] = "interleaved"
    """Which head gets which scope: see `model/position/scope.py`. Stored with the weights, so it can't be changed later."""


Heads = Dense | SlidingWindow | Scope


@dataclass(frozen=True)
class NoBias:
    """Nothing is added to the attention scores."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class Alibi:
    """ALiBi (Press et al., 2022): score − slope · distance."""

    kind: Literal["alibi"] = "alibi"
    uniform: bool = False
    """Give all heads the smallest slope (SCOPE appendix B.4)."""


Bias = NoBias | Alibi


@dataclass(frozen=True)
class QueryScaling:
    """A factor on each query that grows with its position p: 1 + beta · ln(1 + floor(p / original_length)) (Llama 4, Ministral 3).

    It keeps attention sharp over more keys than the model was first trained with.
    """

    beta: Positive = 0.1
    original_length: Size = 16384


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
    """The factors that GARFA learned in one layer."""

    layer: Count = 0
    raw: tuple[float, ...] = ()
    """w of each key/value head: alpha = 0.1 + 9.9·sigmoid(w) (GARFA paper, Eq. 13)."""


@dataclass(frozen=True)
class Garfa:
    """Factors on the RoPE base, one per key/value head, learned in fine-tuning."""

    equation: Literal[14, 12] = 14
    """14: the base times the square root of alpha. 12: the base times alpha."""
    queries: bool = False
    """Rotate queries with their group's factor too, not only keys."""
    layers: tuple[GarfaLayer, ...] = ()


@dataclass(frozen=True)
class Position:
    """The model's position encoding. Rotation, scope and bias are independent, and layers may differ."""

    embedding: Literal["none", "sinusoidal"] = "none"
    """Position embedding added to the token embeddings."""
    rotary: Rotary = field(default_factory=Rope)
    lasp: Lasp | None = None
    heads: Heads = field(default_factory=Dense)
    bias: Bias = field(default_factory=NoBias)
    query_scaling: QueryScaling | None = None
    rules: tuple[LayerRule, ...] = ()
    garfa: Garfa | None = None
    """Written when an adapter is merged; `train.py finetune` trains one."""


# ── Data ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer: its kind, and where it is read from."""

    kind: Literal["auto", "bytes", "sentencepiece", "huggingface"] = "auto"
    """auto: detected from the files in `path`; without a path, a sentencepiece model trained on the data."""
    path: str = ""
    """A tokenizer file, or a directory or hf://ORG/NAME with tokenizer.json or tokenizer.model."""
    vocab_size: Size = 2048
    """Size of a sentencepiece model trained by the run."""


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """Options common to all sources."""

    weight: Positive = 1.0
    """Share of the tokens drawn from this source, relative to the other sources' weights."""
    min_tokens: Count = 0
    """Skip documents with fewer tokens, not counting bos and eos; 0 keeps all."""
    max_tokens: Count = 0
    """Skip documents with more tokens; 0 keeps all."""
    packing: Literal["cut", "best_fit"] = "cut"
    """"cut" fills rows with no token of padding and cuts documents at the end of each row. "best_fit" cuts only documents that are
    longer than a row: those that wait go where they fit best, and what stays empty is padding. It needs data.mask_documents."""


@dataclass(frozen=True, kw_only=True)
class StdlibSource(SourceShare):
    """Source files of Python's standard library: real text that every machine has."""

    kind: Literal["stdlib"] = "stdlib"


@dataclass(frozen=True, kw_only=True)
class TextSource(SourceShare):
    """Plain text files, one document each."""

    kind: Literal["text"] = "text"
    path: str = ""
    """A file, a directory (every *.txt and *.md below it) or a glob."""


@dataclass(frozen=True, kw_only=True)
class JsonlSource(SourceShare):
    """JSON Lines, one document per line."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = ""
    """A file or a glob."""
    field: str = "text"
    """Key that holds the text."""


@dataclass(frozen=True, kw_only=True)
class ParquetSource(SourceShare):
    """Parquet files, one document per row."""

    kind: Literal["parquet"] = "parquet"
    path: str = ""
    """A file or a glob."""
    field: str = "text"
    """Column that holds the text."""


@dataclass(frozen=True, kw_only=True)
class HubSource(SourceShare):
    """Any dataset that `datasets.load_dataset` can stream."""

    kind: Literal["huggingface"] = "huggingface"
    name: str = ""
    """A dataset's name, or a format ("json", "parquet", "csv") with `data_files` or `data_dir`."""
    config: str = ""
    split: str = "train"
    data_dir: tuple[str, ...] | str = ""
    """A folder of the dataset, or several, read as one source."""
    data_files: str = ""
    """A file or a glob, local or a URL (hf://, s3://, gs://, https://)."""
    field: str = "text"
    """Column that holds the text. No other is read, so files may differ in them."""


@dataclass(frozen=True, kw_only=True)
class ShardsSource(SourceShare):
    """Documents that are tokenised already: by `farsight prepare`, or for Megatron-LM or OLMo."""

    kind: Literal["shards"] = "shards"
    path: str = ""
    """A folder that `farsight prepare` wrote; a file, prefix or glob of Megatron-LM's .bin and .idx; a file or glob of OLMo's .npy."""


Source = StdlibSource | TextSource | JsonlSource | ParquetSource | HubSource | ShardsSource


@dataclass(frozen=True)
class Data:
    """Data sources, their mixture and their order."""

    sources: tuple[Source, ...] = (StdlibSource(),)
    seed: int = 0
    """Orders documents and draws sources. The same seed gives the same global batches on any number of ranks."""
    mask_documents: bool = True
    """Tokens see only their own document, and positions restart in each; false lets packed documents see each other."""
    on_bad_row: Literal["error", "skip"] = "error"
    """For a row that can't be read: stop and name its file and line, or skip, count and report it."""
    held_out: PartialShare = 0.01
    """Share of documents kept for validation, chosen by a hash of the text."""
    reader_processes: Count = 0
    """Processes that read and tokenise the training data for each rank that reads; 0 is a thread of the trainer. Token shards
    need none; raw text may where few documents pass a length filter. The batches stay the same."""


# ── The complete config ───────────────────────────────────────────────────────────────────────────────


@dataclass
class JobConfig:
    """Every section of a run's config."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=AdamW)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    evaluations: tuple[Evaluation, ...] = ()
    debug: Debug = field(default_factory=Debug)
    engine: Literal["pytorch", "deepspeed"] = "pytorch"
    """The library that shards the model and runs the steps: PyTorch (every layout in [parallelism]) or DeepSpeed (ZeRO 1 to 3)."""
    architecture: Architecture = field(default_factory=Architecture)
    position: Position = field(default_factory=Position)
    attention: Attention = field(default_factory=Attention)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    loss: Loss = field(default_factory=Loss)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)

    @property
    def checkpoint_folder(self) -> Path:
        """The folder that holds the run's checkpoints, which may be on an object store."""
        return path_of(self.job.store or self.job.dump_folder) / self.checkpoint.folder

    @property
    def model_length(self) -> int:
        """Sequence length, in tokens, that the model's positions are configured for."""
        return self.training.seq_len

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return self.lr_scheduler.warmup_steps
