"""Config sections of `train.py finetune`: a base model, LoRA and GARFA on chosen layers of it, and instruction data.

They stand beside pre-training's, whose `[training]`, `[optimizer]`, `[parallelism]`, `[checkpoint]`, … keep their names and
meaning. What the base says is not said again: its shapes, positions and tokenizer are read from its directory.
"""

from dataclasses import dataclass, field
from typing import Literal

from farsight.configs.schema import (
    ActivationCheckpoint,
    Checkpoint,
    JobConfig,
    LRScheduler,
    Metrics,
    Optimizer,
    Position,
    Training,
    Validation,
)
from farsight.ranges import Count, NonNegative, PartialShare, Positive, Share, Size, SizeOrAuto

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Base:
    """The model that is fine-tuned; its own weights do not change, unless `training.layers` names some."""

    path: str = ""
    """Model directory of a Llama-family model: config.json, safetensors (sharded or not), tokenizer files."""
    quantization: Literal["none", "nf4", "fp4", "int8"] = "nf4"
    """How the blocks' linear layers are kept (bitsandbytes): 4-bit NormalFloat or float, 8-bit, or in `dtype`."""
    double_quantization: bool = True
    """Quantise the 4-bit blocks' scales too: 0.37 bits a weight less."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of what is computed, and of all weights that are not quantised: norms, embedding and head among them."""


@dataclass(frozen=True)
class Lora:
    """LoRA (Hu et al., 2021) with PEFT's layers: W + (alpha / rank)·B·A, with W frozen."""

    enable: bool = True
    rank: Size = 64
    alpha: Positive = 128.0
    dropout: PartialShare = 0.05
    modules: tuple[Projection, ...] = PROJECTIONS
    """Linear layers of a block, by Hugging Face's names."""
    layers: str | tuple[int, ...] = "all"
    """"all"; indices ([0, 23] or "0,23:32", as in position.rules); "sensitive:10", the ten with the largest delta in
    `layer_profile`; "random:10:123", ten that are not in "sensitive:10", drawn with seed 123 (GARFA, section 4)."""
    dora: bool = False
    """DoRA (Liu et al., 2024): a learned magnitude for each output."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, 2023)."""
    rank_pattern: dict[str, Size] = field(default_factory=dict)
    """Another rank for some modules, by name or by pattern: { o_proj = 16, "layers.31.*q_proj" = 8 }."""
    alpha_pattern: dict[str, Positive] = field(default_factory=dict)
    """Another alpha, likewise."""


@dataclass(frozen=True)
class GarfaTraining:
    """GARFA: a learned factor on the RoPE base of each key/value head (GARFA paper, Eq. 12 to 14)."""

    enable: bool = True
    layers: str | tuple[int, ...] = "all"
    """As lora.layers. All of them have to rotate."""
    init: Literal["identity", "paper"] = "identity"
    """identity: w = -ln 10, so that alpha = 1 and training starts from the base's own function. paper: w = 2.2, which the
    paper takes for 1 and which is alpha = 9.012."""
    equation: Literal[14, 12] = 14
    """14: the base times the square root of alpha. 12: the base times alpha."""
    queries: bool = False
    """Turn queries by their group's factor too; the paper turns keys alone."""
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises."""
    min_lr_factor: Share = 0.0
    """Learning rate at the end of the cosine, over `lr`."""


Format = Literal["auto", "alpaca", "sharegpt", "messages", "text"]
TrainOn = Literal["assistant", "all"]


@dataclass(frozen=True, kw_only=True)
class InstructionShare:
    """What every source of instructions has."""

    format: Format = "auto"
    """Of the rows: alpaca (instruction, input, output), sharegpt (conversations of from/value), messages (role/content), or
    text, all of which is trained; auto looks at the columns."""
    question: str = "instruction"
    """Column of alpaca's instruction, where it has another name: "query" in MetaMathQA, "problem" in Magicoder's."""
    answer: str = "output"
    """Column of alpaca's output, likewise."""
    rows: Count = 0
    """Take only so many rows, chosen by data.seed; 0 takes all."""
    weight: Positive = 1.0
    """Times that an epoch goes over the rows: 2 takes each twice, 0.25 a quarter of them, in each epoch the next."""


@dataclass(frozen=True, kw_only=True)
class InstructionJsonl(InstructionShare):
    """One JSON object a line."""

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
    """Conversations, and how they become rows of tokens."""

    sources: tuple[InstructionSource, ...] = ()
    seed: int = 0
    """Orders the rows of each epoch. The same seed gives the same global batches on any number of ranks."""
    held_out: PartialShare = 0.02
    """Share of conversations kept for validation, chosen by a hash of the text."""
    packing: bool = True
    """Put several conversations into a row of training.seq_len tokens; false gives each a row, padded to the batch's
    longest."""
    mask_documents: bool = True
    """Packed conversations do not see each other, and positions restart with each."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """A conversation of more than training.seq_len tokens: cut its end off, leave it out, or stop. Counted and reported."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that can't be read: stop with its file and line, or skip, count and report it."""
    train_on: TrainOn = "assistant"
    """Turns whose tokens are trained. A turn's own "train" (true or false) wins over it."""
    chat_template: str = ""
    """A Jinja file; empty takes the tokenizer's own, or Llama 3's where it has none."""


@dataclass
class FinetuneTraining(Training):
    """torchtitan's, and how long by epochs."""

    epochs: Positive = 1.0
    """Passes over the data, where `steps` is 0."""
    steps: Count = 0
    """Optimizer steps; 0 takes `epochs`."""
    seq_len: Size = 1024
    local_batch_size: Size = 4
    clip: Literal["overall", "group"] = "overall"
    """Clip the norm of all gradients to max_norm, or that of LoRA's and of GARFA's each."""


@dataclass
class FinetuneOptimizer(Optimizer):
    """Of LoRA, or of the layers in training.layers; [garfa] has its own learning rate and weight decay."""

    name: Literal["AdamW", "Adam", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit"] = "AdamW"  # type: ignore[assignment]  # torchtitan takes any string
    """The 8-bit and paged ones are bitsandbytes': moments in 8 bits; moments that move to the host's memory when the GPU's is
    full."""
    lr: Positive = 2e-4
    beta2: PartialShare = 0.999
    """PyTorch's and the papers' value; pre-training takes torchtitan's 0.95."""
    weight_decay: NonNegative = 0.01


@dataclass
class FinetuneSchedule(LRScheduler):
    """Of LoRA, or of the layers in training.layers; [garfa] has its own."""

    warmup_steps: Count = 0
    """Steps in which the learning rate rises; 0 takes `warmup_ratio`."""
    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"


@dataclass
class FinetuneValidation(Validation):
    """Of the conversations that `data.held_out` keeps."""

    freq: Size = 100
    steps: SizeOrAuto = -1
    """Batches; -1 takes all that is held out."""


@dataclass
class FinetuneMetrics(Metrics):
    log_freq: Size = 5


@dataclass
class FinetuneCheckpoint(Checkpoint):
    """Adapters and the optimizer's state, not the base."""

    interval: Size = 100


@dataclass
class FinetuneActivationCheckpoint(ActivationCheckpoint):
    mode: Literal["selective", "full", "memory_budget", "none"] = "full"


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run whose validation loss no longer falls. The best adapter is kept in any case."""

    patience: Count = 0
    """Validations in a row without a better loss that end the run; 0 never does."""
    min_delta: NonNegative = 0.0
    """A loss that is lower by less does not count as better for `patience`."""


@dataclass
class FinetuneConfig(JobConfig):
    """Pre-training's sections with defaults for one GPU, and fine-tuning's beside them."""

    base_model: Base = field(default_factory=Base)
    lora: Lora = field(default_factory=Lora)
    garfa: GarfaTraining = field(default_factory=GarfaTraining)
    layer_profile: str = ""
    """JSON file of each layer's sensitivity, {"delta": [one number a layer]}, for "sensitive:N" and "random:N:SEED"."""
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    position: Position | None = None  # type: ignore[assignment]  # None until the base's is read
    """In place of the base's, to extend its context; empty takes the base's."""
    merge: bool = False
    """At the end write model/ too: the adapter merged into its base, as `farsight merge` does it."""
    trained_length: Count = 0
    """Sequence length that positions are made for, such as SCOPE's longest scope; 0 takes the base's, or
    training.seq_len where that is more."""
    data: InstructionData = field(default_factory=InstructionData)  # type: ignore[assignment]  # rows in place of documents
    training: FinetuneTraining = field(default_factory=FinetuneTraining)
    optimizer: FinetuneOptimizer = field(default_factory=FinetuneOptimizer)
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
