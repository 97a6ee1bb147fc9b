"""Options that torchtitan or earlier versions of Farsight had: where they went, and config files that still name them."""

import copy
from typing import Any

HERE = {
    "model.hf_assets_path": "tokenizer.path",
    "model.tokenizer_path": "tokenizer.path",
    "training.dataset": "data.sources",
    "training.dataset_path": "data.sources",
    "validation.dataset": "data.held_out",
    "validation.dataset_path": "data.held_out",
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_layers_per_stage": "parallelism.pipeline_parallel_stages_per_rank",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_in_hf": "checkpoint.initial_load_path",
    "optimizer.fused": "optimizer.implementation",
    "optimizer.name": "optimizer.kind",
    "metrics.enable_tensorboard": "metrics.trackers",
    "metrics.enable_wandb": "metrics.trackers",
}
"""torchtitan's options, by its own or an older name, whose meaning has another name here."""

OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adam",
    "AdamW8bit": "adamw8bit",
    "PagedAdamW": "paged_adamw",
    "PagedAdamW8bit": "paged_adamw8bit",
}
"""The kinds of optimizer by the names that `optimizer.name` had."""

_DATA_LOADER = {"num_workers": 0, "persistent_workers": False, "pin_memory": False}

WITHOUT_EFFECT: dict[str, Any] = {
    "job": {"custom_config_module": "", "save_config_file": None},
    "metrics": {"disable_color_printing": False, "save_for_all_ranks": False, "enable_wandb": False},
    "model": {"hf_assets_path": "", "name": "farsight"},
    "optimizer": {"early_step_in_backward": False},
    "training": {
        "mixed_precision_reduce": "float32", "gc_debug": False, "dataset": "c4_test", "dataloader": _DATA_LOADER,
    },
    "parallelism": {
        "disable_loss_parallel": False, "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1, "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_expert_parallel_overlap": True, "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1, "expert_tensor_parallel_degree": 1, "expert_parallel_comm_backend": "standard",
    },
    "checkpoint": {
        "last_save_model_only": False, "initial_load_in_hf": False, "initial_load_in_hf_quantized": False,
        "last_save_in_hf": False, "export_dtype": "float32", "create_seed_checkpoint": False,
        "enable_ft_dataloader_checkpoints": True,
    },
    "activation_checkpoint": {
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"], "determinism_check": "default", "debug": False,
    },
    "compile": {"components": ["model"]},
    "quantize": {
        "linear": {
            "mx": {"mxfp8_dim1_cast_kernel_choice": "triton", "recipe_name": "mxfp8_cublas", "filter_fqns": ["output"]},
        },
        "grouped_mm": {"float8": {"fqns": []}, "mx": {"recipe_name": "mxfp8", "fqns": []}},
    },
    "comm": {"save_traces_file_prefix": "rank_", "mode": "default"},
    "memory_estimation": {"enable": False, "disable_fake_mode": False},
    "fault_tolerance": {
        "enable": False, "process_group": "gloo", "process_group_timeout_ms": 10000, "replica_id": 0, "group_size": 0,
        "min_replica_size": 1,
    },
    "experimental": {"custom_import": "", "custom_args_module": ""},
    "validation": {"dataset": "c4_validation", "dataloader": _DATA_LOADER},
    "debug": {"moe_force_load_balance": False},
}  # fmt: skip
"""Options that earlier versions wrote to every run folder's config.toml, with the value that meant nothing there."""


def is_former(name: str) -> bool:
    """True if torchtitan or an earlier version of Farsight had an option or section of this name."""
    there: Any = WITHOUT_EFFECT
    for key in name.split("."):
        if not isinstance(there, dict) or key not in there:
            return False
        there = there[key]
    return True


def current(values: dict[str, Any]) -> dict[str, Any]:
    """Settings under today's names: a config.toml of an earlier version still loads, and means the same."""
    values = _without(copy.deepcopy(values), WITHOUT_EFFECT)
    excluded = values.get("checkpoint", {}).get("exclude_from_loading")
    if isinstance(excluded, list) and "lr_scheduler" in excluded:
        excluded.remove("lr_scheduler")  # the rate depends on the step alone
    if values.get("engine") == "torchtitan":
        values["engine"] = "pytorch"
    metrics = values.get("metrics")
    if isinstance(metrics, dict) and isinstance(metrics.get("enable_tensorboard"), bool):
        on = metrics.pop("enable_tensorboard")
        metrics.setdefault("trackers", ["tensorboard"] if on else [])
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and "kind" not in optimizer and optimizer.get("name") in OPTIMIZERS:
        optimizer["kind"] = OPTIMIZERS[optimizer.pop("name")]
        if optimizer["kind"] not in ("adamw", "adam"):
            optimizer.pop("implementation", None)
    return values


def _without(values: dict[str, Any], without_effect: dict[str, Any]) -> dict[str, Any]:
    for key, value in without_effect.items():
        there = values.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            if not _without(there, value):
                del values[key]
        elif key in values and there == value and type(there) is type(value):
            del values[key]
    return values
