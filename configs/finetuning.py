"""Config sections of `train.py finetune`: a base model, LoRA and GARFA on chosen layers of it, and instruction data.

They are added to pre-training's sections (`[training]`, `[optimizer]`, `[parallelism]`, `[checkpoint]`, …), which keep their
names and meaning. The base's shapes, positions and tokenizer are read from its directory and need not be repeated.
"""

from dataclasses import dataclass, field
from typing import Literal

from farsight.configs.optimizers import FinetuneAdamW as FinetuneAdamW
from farsight.configs.optimizers import FinetuneOptimizer as FinetuneOptimizer
from farsight.configs.schema import (
    ActivationCheckpoint,
    Checkpoint,
    JobConfig,
    LRScheduler,
    Metrics,
    Position,
    Training,
    Validation,
)
from farsight.ranges import Count, NonNegative, PartialShare, Positive, Share, Size, SizeOrAuto

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Base:
    """The model to fine-tune; its own weights are frozen, except in layers named by `training.layers`."""

    path: str = ""
    """Directory, or hf://ORG/NAME, of a model of a known family (docs/inference/models.md): config.json, safetensors, tokenizer files."""
    quantization: Literal["none", "nf4", "fp4", "int8"] = "nf4"
    """Storage of the blocks' linear layers (bitsandbytes): 4-bit NormalFloat or float, 8-bit, or "none" for `dtype`."""
    double_quantization: bool = True
    """Quantise the scales of 4-bit weights too, which saves 0.37 bits per weight."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of computation, and of all weights that are not quantised, such as norms, embedding and head."""


@dataclass(frozen=True)
class Lora:
    """LoRA (Hu et al., 2021) with PEFT's layers: W + (alpha / rank)·B·A, with W frozen."""

    enable: bool = True
    rank: Size = 64
    alpha: Positive = 128.0
    dropout: PartialShare = 0.05
    modules: tuple[Projection, ...] = PROJECTIONS
    """Linear layers of a block to adapt, by their Hugging Face names."""
    layers: str | tuple[int, ...] = "all"
    """"all"; indices ([0, 23] or "0,23:32", as in position.rules); "sensitive:10", the ten with the largest delta in
    `layer_profile`; "random:10:123", ten that are not in "sensitive:10", drawn with seed 123 (GARFA, section 4)."""
    dora: bool = False
    """DoRA (Liu et al., 2024): learn a magnitude for each output too."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, 2023)."""
    rank_pattern: dict[str, Size] = field(default_factory=dict)
    """Different ranks for some modules, by name or pattern: { o_proj = 16, "layers.31.*q_proj" = 8 }."""
    alpha_pattern: dict[str, Positive] = field(default_factory=dict)
    """Different alphas for some modules, likewise."""


@dataclass(frozen=True)
class GarfaTraining:
    """GARFA: learns a factor on the RoPE base of each key/value head (GARFA paper, Eq. 12 to 14)."""

    enable: bool = True
    layers: str | tuple[int, ...] = "all"
    """As lora.layers. All of these layers must use RoPE."""
    init: Literal["identity", "paper"] = "identity"
    """identity: w = -ln 10, so that alpha = 1 and training starts from the unchanged base. paper: w = 2.2, which the paper
    says gives 1 but which gives alpha = 9.012."""
    equation: Literal[14, 12] = 14
    """14: the base times the square root of alpha. 12: the base times alpha."""
    queries: bool = False
    """Rotate queries with their group's factor too; the paper changes only keys."""
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    warmup_ratio: Share = 0.03
    """Share of the steps over which the learning rate rises."""
    min_lr_factor: Share = 0.0
    """Learning rate at the end of the cosine, as a share of `lr`."""


Format = Literal["auto", "alpaca", "sharegpt", "messages", "text"]
TrainOn = Literal["assistant", "all"]


@dataclass(frozen=True, kw_only=True)
class InstructionShare:
    """Options common to all sources of instructions."""

    format: Format = "auto"
    """Format of the rows: alpaca (instruction, input, output), sharegpt (conversations of from/value), messages
    (role/content), or text, all of which is trained on; auto detects it from the columns."""
    question: str = "instruction"
    """Column of alpaca's instruction if it has another name: "query" in MetaMathQA, "problem" in Magicoder's."""
    answer: str = "output"
    """Column of alpaca's output, likewise."""
    rows: Count = 0
    """Rows to use, chosen by data.seed; 0 uses all."""
    weight: Positive = 1.0
    """How often an epoch uses each row: 2 takes each twice; 0.25 takes a quarter of them, the next quarter in the next
    epoch."""


@dataclass(frozen=True, kw_only=True)
class InstructionJsonl(InstructionShare):
    """JSON Lines: one row per line. A file may also be one JSON array of rows."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = ""
    """A file or a glob."""


@dataclass(frozen=True, kw_only=True)
class InstructionParquet(InstructionShare):
    """Parquet files."""

    kind: Literal["parquet"] = "parquet"
    path: str = ""
    """A file or a glob."""


@dataclass(frozen=True, kw_only=True)
class InstructionHub(InstructionShare):
    """Any dataset that `datasets.load_dataset` can load."""

    kind: Literal["huggingface"] = "huggingface"
    name: str = ""
    """A dataset's name, or a format ("json", "parquet", "csv") with `data_files` or `data_dir`."""
    config: str = ""
    split: str = "train"
    data_dir: str = ""
    data_files: str = ""
    """A file or a glob, local or a URL."""


InstructionSource = InstructionJsonl | InstructionParquet | InstructionHub


@dataclass(frozen=True)
class InstructionData:
    """Conversations, and how they are turned into rows of tokens."""

    sources: tuple[InstructionSource, ...] = ()
    seed: int = 0
    """Orders the rows of each epoch. The same seed gives the same global batches on any number of ranks."""
    held_out: PartialShare = 0.02
    """Share of conversations kept for validation, chosen by a hash of the text."""
    packing: bool = True
    """Pack several conversations into a row of training.seq_len tokens; false gives each its own row, padded to the
    longest of its micro-batch, which are rows of like length."""
    mask_documents: bool = True
    """Packed conversations do not see each other, and positions restart in each."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """For conversations of more than training.seq_len tokens: cut off the end, drop them, or stop. Reported with a count."""
    on_bad_row: Literal["error", "skip"] = "error"
    """For a row that can't be read: stop and name its file and line, or skip, count and report it."""
    train_on: TrainOn = "assistant"
    """Turns to train on. A turn's own "train" (true or false) takes precedence."""
    chat_template: str = ""
    """A Jinja file; empty takes the tokenizer's template, or Llama 3's if it has none."""


@dataclass
class FinetuneTraining(Training):
    """Batches, steps and precision; the length of training can be given in epochs."""

    epochs: Positive = 1.0
    """Passes over the data; used if `steps` is 0."""
    steps: Count = 0
    """Optimizer steps; 0 uses `epochs`."""
    seq_len: Size = 1024
    local_batch_size: Size = 4
    clip: Literal["overall", "group"] = "overall"
    """Clip the norm of all gradients to max_norm, or those of LoRA's and GARFA's gradients separately."""


@dataclass
class FinetuneSchedule(LRScheduler):
    """Schedule of LoRA, or of the layers in training.layers; [garfa] has its own."""

    warmup_steps: Count = 0
    """Steps over which the learning rate rises; 0 uses `warmup_ratio`."""
    warmup_ratio: Share = 0.03
    """Share of the steps over which the learning rate rises."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"


@dataclass
class FinetuneValidation(Validation):
    """Loss on the conversations that `data.held_out` keeps for validation."""

    freq: Size = 100
    steps: SizeOrAuto = -1
    """Batches; -1 takes all held-out conversations."""


@dataclass
class FinetuneMetrics(Metrics):
    """Metrics, logged more often than in pre-training."""

    log_freq: Size = 5


@dataclass
class FinetuneCheckpoint(Checkpoint):
    """Checkpoints hold adapters and optimizer state, not the base."""

    interval: Size = 100


@dataclass
class FinetuneActivationCheckpoint(ActivationCheckpoint):
    """Recomputation of activations, of whole blocks by default."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "full"


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run whose validation loss no longer falls. The best adapter is always kept."""

    patience: Count = 0
    """End the run after this many validations in a row without a better loss; 0 never does."""
    min_delta: NonNegative = 0.0
    """Smallest improvement of the loss that counts for `patience`."""


@dataclass
class FinetuneConfig(JobConfig):
    """Pre-training's sections with defaults for one GPU, and fine-tuning's own."""

    base_model: Base = field(default_factory=Base)
    lora: Lora = field(default_factory=Lora)
    garfa: GarfaTraining = field(default_factory=GarfaTraining)
    layer_profile: str = ""
    """JSON file with each layer's sensitivity, {"delta": [one number per layer]}, for "sensitive:N" and "random:N:SEED"."""
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    position: Position | None = None  # type: ignore[assignment]  # None until the base's is read
    """Replaces the base's positions, to extend its context; leave it out to keep them."""
    merge: bool = False
    """At the end also write model/, the adapter merged into its base as by `farsight merge`."""
    trained_length: Count = 0
    """Sequence length that positions are configured for, such as SCOPE's longest scope; 0 takes the base's, or
    training.seq_len if that is longer."""
    data: InstructionData = field(default_factory=InstructionData)  # type: ignore[assignment]  # rows in place of documents
    training: FinetuneTraining = field(default_factory=FinetuneTraining)
    optimizer: FinetuneOptimizer = field(default_factory=FinetuneAdamW)  # type: ignore[assignment]  # other defaults and kinds
    lr_scheduler: FinetuneSchedule = field(default_factory=FinetuneSchedule)
    validation: FinetuneValidation = field(default_factory=FinetuneValidation)
    metrics: FinetuneMetrics = field(default_factory=FinetuneMetrics)
    checkpoint: FinetuneCheckpoint = field(default_factory=FinetuneCheckpoint)
    activation_checkpoint: FinetuneActivationCheckpoint = field(default_factory=FinetuneActivationCheckpoint)

    @property
    def model_length(self) -> int:
        return self.trained_length or self.training.seq_len

    @property
    def warmup_steps(self) -> int:
        return self.lr_scheduler.warmup_steps or round(self.lr_scheduler.warmup_ratio * self.training.steps)
