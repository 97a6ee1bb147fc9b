"""The config section on checkpoints."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from farsight.ranges import Count, NonNegative, Range, Size


@dataclass
class Checkpoint:
    """Saving, resuming, and starting from existing weights."""

    enable: bool = True
    """Save checkpoints, and resume from the newest."""
    folder: str = "checkpoint"
    """Folder for checkpoints, inside the run folder."""
    interval: Size = 500
    """Steps between saves; one more comes after the last step."""
    interval_minutes: NonNegative = 30.0
    """Minutes after which to save, from the end of the last save, if no `interval` of steps ends before; 0 saves by steps alone."""
    initial_load_path: str | None = None
    """Model directory (or hf://ORG/NAME, docs/inference/hub.md) or checkpoint that a new run starts from; a run with checkpoints
    of its own resumes from those instead."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; false takes the optimizer state too."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save in the background: "async" copies the state first, "async_with_pinned_mem" into pinned memory of another
    process."""
    keep_latest_k: Count = 2
    """Checkpoints to keep, 2 or more; 0 keeps all. With verify, an old one is deleted when a newer one is verified."""
    keep_best: str = ""
    """Figure of which the best checkpoint so far is kept too: "val_loss", or one of [[evaluations]], such as "needle.mean". A
    new best is saved at once, and best.json in the run folder names it."""
    load_step: Annotated[int, Range(least=0, also=-1)] = -1
    """Step to resume from; -1 takes the newest."""
    exclude_from_loading: list[Literal["optimizer", "dataloader", "train_state"]] = field(default_factory=list)
    """Parts of initial_load_path's state not to load, if initial_load_model_only is false; "train_state" is the step, which
    sets the learning rate, and the count of tokens."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step as well, to see early that saving works."""
    load_only: bool = False
    """Load checkpoints but save none."""
    verify: bool = True
    """Verify every file's checksums before a checkpoint is used, and in the background once it is saved; false compares only
    sizes, before it is used."""
    accept_changes: tuple[Literal["position", "optimizer"], ...] = ()
    """Settings that may differ from those of the checkpoint that the run resumes from: "position" (anything in
    [position]), "optimizer" (numbers in [optimizer], [lr_scheduler] and fine-tuning's [garfa]). All other changes are
    refused."""
