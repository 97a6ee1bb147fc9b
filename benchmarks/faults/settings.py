"""Settings that can't be used: numbers out of range, broken config files, options that contradict each other."""

from farsight.benchmarks.faults.workshop import Case

TRAIN = "train.py --job.config_file {config} --job.dump_folder {here}/new"
TUNE = "train.py finetune --job.config_file {finetune} --base_model.path {dense} --job.dump_folder {here}/new"
FILE = "train.py --job.config_file {here}/x.toml --job.dump_folder {here}/new"
RECIPE = "recipe {here}/x.toml --recipe.folder {here}/runs"

_NUMBERS = {
    "optimizer.lr": ("nan", "inf", "0", "-0.001", "fast"),
    "optimizer.weight_decay": ("nan", "-0.5"),
    "optimizer.beta1": ("-0.1", "1"),
    "optimizer.beta2": ("1.5", "nan"),
    "optimizer.eps": ("-1", "0"),
    "lr_scheduler.decay_ratio": ("nan", "5", "-1"),
    "lr_scheduler.warmup_steps": ("-3", "1.5"),
    "lr_scheduler.min_lr_factor": ("7", "nan"),
    "training.tokens": ("nan", "-5", "inf"),
    "training.max_norm": ("nan", "0", "-1"),
    "training.seq_len": ("0", "-8", "9999999999999999999999"),
    "training.steps": ("0", "-1", "two"),
    "training.local_batch_size": ("0", "-2"),
    "training.global_batch_size": ("0", "-4"),
    "checkpoint.keep_latest_k": ("-1", "1"),
    "checkpoint.interval": ("0", "-3"),
    "checkpoint.interval_minutes": ("-1", "nan"),
    "checkpoint.load_step": ("-7",),
    "loss.chunk_tokens": ("-5",),
    "metrics.log_freq": ("0",),
    "validation.freq": ("0", "-1"),
    "validation.steps": ("0", "-5"),
    "architecture.dim": ("0", "-64", "1000000000000"),
    "architecture.head_dim": ("7", "0"),
    "architecture.n_kv_heads": ("3", "0"),
    "architecture.vocab_size": ("-1",),
    "position.rotary.theta": ("inf", "nan", "0", "-10000"),
    "position.heads.s_max": ("-1",),
    "data.held_out": ("1", "-0.1", "nan"),
    "comm.train_timeout_seconds": ("0", "-1"),
    "debug.seed": ("-1", "99999999999999999999"),
}
_TUNED = {
    "training.epochs": ("nan", "-1", "0"),
    "lora.rank": ("0", "-1"),
    "lora.alpha": ("nan", "0"),
    "lora.dropout": ("1", "-0.1", "nan"),
    "garfa.lr": ("inf", "-1"),
    "early_stopping.patience": ("-1", "-2"),
    "early_stopping.min_delta": ("nan", "-1"),
    "optimizer.weight_decay": ("-0.5",),
    "lr_scheduler.warmup_ratio": ("2", "nan"),
}
_LAYOUTS = {
    "--parallelism.tensor_parallel_degree 2": "2",
    "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2": "2",
    "--parallelism.context_parallel_degree 2": "2",
    "--parallelism.data_parallel_shard_degree 0": "data_parallel_shard_degree",
    "--parallelism.data_parallel_shard_degree -2": "data_parallel_shard_degree",
    "--parallelism.data_parallel_shard_degree 4": "data_parallel_shard_degree",
    "--parallelism.data_parallel_replicate_degree 3": "data_parallel_replicate_degree",
    "--parallelism.data_parallel_replicate_degree 0": "data_parallel_replicate_degree",
}
_TOML = {
    "its own base": (b'base = "x.toml"\n', ("x.toml", "its own base")),
    "a missing base": (b'base = "gone.toml"\n', ("gone.toml",)),
    "a base that is a number": (b"base = 3\n", ("base",)),
    "5,000 digits": (b"[training]\nsteps = " + b"9" * 5000, ("x.toml", "not valid TOML")),
    "brackets 20,000 deep": (b"x = " + b"[" * 20000 + b"]" * 20000, ("x.toml", "not valid TOML")),
    "no TOML": (b"[training\nsteps = 1", ("x.toml", "not valid TOML")),
    "UTF-16": ("[training]\nsteps = 1\n".encode("utf-16"), ("x.toml",)),
    "binary": (bytes(range(256)), ("x.toml",)),
    "an unknown section": (b"[trainign]\nsteps = 3\n", ("trainign", "training")),
    "an unknown option": (b"[training]\nstep = 3\n", ("training.step", "steps")),
    "a number for a section": (b"training = 3\n", ("training", "table")),
    "text for a number": (b'[training]\nsteps = "many"\n', ("training.steps", "whole number")),
    "true for a number": (b"[training]\nsteps = true\n", ("training.steps", "whole number")),
    "NaN": (b"[optimizer]\nlr = nan\n", ("optimizer.lr", "finite")),
    "an unknown kind": (b'[position]\nrotary = { kind = "ropes" }\n', ("ropes", "rope")),
    "another kind's field": (b'[position]\nrotary = { kind = "rope", factor = 2 }\n', ("factor",)),
    "a rule for no layer": (b'[[position.rules]]\nlayers = "9"\nrotary = { kind = "none" }\n', ("layers", "9")),
    "sources that are a number": (b"[data]\nsources = 3\n", ("data.sources",)),
    "a flavor that is not there": (b'[model]\nflavor = "huge"\n', ("huge",)),
    "a checkpoint folder outside": (b'[checkpoint]\nfolder = "../../x"\n', ("checkpoint.folder", "..")),
    "a recipe": (b'[[stages]]\nname = "a"\n', ("farsight recipe",)),
}
_OPTIONS = {
    TRAIN + " --training 5 --training.steps 3": ("training", "options of its own"),
    TRAIN + " --training.steps 3 --training 5": ("training", "options of its own"),
    TRAIN + " --training 5": ("training", "table"),
    TRAIN + " --trainng.steps 3": ("trainng", "training"),
    TRAIN + " stray": ("stray",),
    TRAIN + " --data.sources.7.weight 2": ("data.sources",),
    TRAIN + " --position.rotary kind=rope": ("position.rotary",),
    TRAIN + " --checkpoint.initial_load_path {here}/none": ("initial_load_path", "none"),
    TRAIN + " --tokenizer.kind auto --tokenizer.path {here}/none": ("tokenizer.path", "none"),
    "train.py --help nosuch": ("nosuch",),
    "train.py nosuch": ("nosuch",),
    "train.py --job.config_file {here}/gone.toml": ("gone.toml",),
    "train.py --job.config_file {here}": ("directory",),
    "train.py finetune --help nosuch": ("nosuch",),
    "train.py finetune --job.config_file {finetune} --job.dump_folder {here}/new": ("base_model.path",),
    "train.py finetune --job.config_file {finetune} --base_model.path {here}/gone --job.dump_folder {here}/new": (
        "gone",
    ),
}
_RECIPES = {
    "a stage named ..": ('[[stages]]\nname = ".."\n', ("..",)),
    "a stage named .": ('[[stages]]\nname = "."\n', ("name",)),
    "a recipe that leaves its folder": ('[recipe]\nname = "../../x"\n[[stages]]\nname = "a"\n', ("../../x",)),
    "a recipe with an absolute name": ('[recipe]\nname = "/tmp/x"\n[[stages]]\nname = "a"\n', ("/tmp/x",)),
    "no stages": ("[recipe]\nname = 'x'\n", ("stages",)),
    "stages that are a number": ("stages = 3\n", ("stages",)),
    "two stages of one name": ('[[stages]]\nname = "a"\n[[stages]]\nname = "a"\n', ("names of their own",)),
    "a length of 0": ('[recipe]\nperplexity_lengths = [0]\n[[stages]]\nname = "a"\n', ("perplexity_lengths",)),
    "tokens that are negative": ('[recipe]\nperplexity_tokens = -4\n[[stages]]\nname = "a"\n', ("perplexity_tokens",)),
    "no GPUs": ('[recipe]\ngpus = 0\n[[stages]]\nname = "a"\n', ("gpus",)),
    "data that are not there": ('[recipe]\nperplexity_data = "gone.txt"\n[[stages]]\nname = "a"\n', ("gone.txt",)),
    "a start that is not there": ('[recipe]\nstart = "gone"\n[[stages]]\nname = "a"\n', ("gone",)),
    "an unknown key": ('[recipe]\nnames = "x"\n[[stages]]\nname = "a"\n', ("names", "name")),
    "a stage's optimizer_state": ('[[stages]]\nname = "a"\noptimizer_state = "keep"\n', ("optimizer_state",)),
}


def cases() -> list[Case]:
    """All of them; none has trained a step when it ends."""
    found = []
    for base, table in ((TRAIN, _NUMBERS), (TUNE, _TUNED)):
        for option, values in table.items():
            for value in values:
                found.append(
                    Case(f"{option} = {value}", f"{base} --{option}={value}", (option.split(".")[-1], value[:10]))
                )
    found += [Case(options, f"{TRAIN} {options}", (says,)) for options, says in _LAYOUTS.items()]
    found += [Case(f"TOML: {name}", FILE, says, {"x.toml": content}) for name, (content, says) in _TOML.items()]
    found += [Case(command, command, says) for command, says in _OPTIONS.items()]
    found += [
        Case(
            f"recipe: {name}", f"{RECIPE} --dry-run", says, {"x.toml": f'base = "base.toml"\n{text}', "base.toml": BASE}
        )
        for name, (text, says) in _RECIPES.items()
    ]
    return found


BASE = """
[tokenizer]
kind = "bytes"

[training]
seq_len = 32
local_batch_size = 2
global_batch_size = 2
steps = 4

[lr_scheduler]
warmup_steps = 1
"""
