"""The config section on checkpoints."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from farsight.ranges import Count, Range, Size


@dataclass
class Checkpoint:
    """Saving, resuming, and starting from existing weights."""

    enable: bool = True
    """Save checkpoints, and resume from the newest."""
    folder: str = "checkpoint"
    """Folder for checkpoints, inside the run folder."""
    interval: Size = 500
    """Steps between saves; one more comes after the last step."""
    initial_load_path: str | None = None
    """Model directory or checkpoint that a new run starts from; a run with checkpoints of its own resumes from those
    instead."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; false takes the optimizer state too."""
    last_save_model_only: bool = False
    """Has to stay false: the last checkpoint keeps the optimizer too, so that a finished run can be continued."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save in the background: "async" copies the state first, "async_with_pinned_mem" into pinned memory of another
    process."""
    keep_latest_k: Count = 2
    """Checkpoints to keep, 2 or more; 0 keeps all."""
    load_step: Annotated[int, Range(least=0, also=-1)] = -1
    """Step to resume from; -1 takes the newest."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts of the state not to load, such as "optimizer", "lr_scheduler", "dataloader", "train_state"."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step as well, to see early that saving works."""
    load_only: bool = False
    """Load checkpoints but save none."""
    verify: bool = True
    """Verify every file's checksums before a checkpoint is used; false compares only sizes."""
    accept_changes: tuple[Literal["position", "optimizer"], ...] = ()
    """Settings that may differ from those of the checkpoint that the run resumes from: "position" (anything in
    [position]), "optimizer" (numbers in [optimizer], [lr_scheduler] and fine-tuning's [garfa]). All other changes are
    refused."""
    # torchtitan reads these; they have no effect, or `configs/check.py` refuses other values.
    initial_load_in_hf: bool = False
    initial_load_in_hf_quantized: bool = False
    last_save_in_hf: bool = False
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    create_seed_checkpoint: bool = False
    enable_ft_dataloader_checkpoints: bool = True
