"""Reports of `train.py finetune` before it trains: the model, trained parameters and memory, or rows of data."""

from collections.abc import Sequence

from farsight.configs.finetuning import FinetuneConfig
from farsight.data.instructions.loader import build_instruction_loader
from farsight.data.instructions.view import inspect_rows
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from farsight.launch.plan.finetune_fit import find_device, memory_text
from farsight.launch.plan.finetune_memory import adapter_parameters, finetune_memory
from farsight.launch.plan.out_of_memory import explain_out_of_memory
from farsight.model.adapt.layers import adapted
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.position.layers import describe, layer_selection
from farsight.training.finetune.trainer import Finetuner
from farsight.training.memory_recorder import MemoryMarks


def take_inspect(arguments: Sequence[str]) -> tuple[list[str], int]:
    """The other arguments, and N of `--inspect N`, or 0 without it.

    Raises:
        ConfigError: N is not a positive number.
    """
    rest, inspect = [], 0
    given = iter(arguments)
    for argument in given:
        name, _, value = argument.partition("=")
        if name == "--inspect":
            value = value or next(given, "")
            if not value.isdigit() or not int(value):
                raise ConfigError(f"--inspect{value and f' {value}'}: say how many rows to show, such as --inspect 3.")
            inspect = int(value)
        else:
            rest.append(argument)
    return rest, inspect


def rows(config: FinetuneConfig, number: int) -> str:
    """The first `number` rows of training data as the model sees them."""
    tokenizer = load_tokenizer(config.tokenizer)
    return inspect_rows(build_instruction_loader(config, tokenizer, 0, 1), tokenizer, number)


def summary(config: FinetuneConfig, ranks: int) -> str:
    """Describes the base's layers, the trained parameters, the optimizer, and the memory of one rank."""
    layers, trained = adapted(config), adapter_parameters(config)
    model, lines = ModelConfig.from_job(config), []
    lines.append(f"base {config.base_model.path}: {count_parameters(model):,} parameters, {_kept(config)}")
    lines.append(describe(model.layers()))
    if layers.lora:
        lines.append(
            f"LoRA of rank {config.lora.rank} on layers {layer_selection(layers.lora)}: {trained['lora']:,} parameters"
        )
    if layers.garfa:
        lines.append(f"GARFA on layers {layer_selection(layers.garfa)}: {trained['garfa']:,} parameters")
    if layers.whole:
        lines.append(f"all weights of layers {layer_selection(layers.whole)}: {trained['layers']:,} parameters")
    o = config.optimizer
    lines.append(
        f"{o.name}: lr {o.lr:g}, betas {o.beta1:g} and {o.beta2:g}, eps {o.eps:g}, weight decay {o.weight_decay:g}"
    )
    device = find_device()
    lines.append(memory_text(finetune_memory(config, ranks, device.cpu), config, device, ranks))
    return "\n".join(lines)


def _kept(config: FinetuneConfig) -> str:
    base = config.base_model
    if base.quantization == "none":
        return base.dtype
    double = ", double quantised" * (base.double_quantization and base.quantization != "int8")
    return f"linear layers in {base.quantization}{double}, the rest in {base.dtype}"


def out_of_memory(config: FinetuneConfig, ranks: int, error: BaseException, trainer: Finetuner | None) -> str:
    """The message for an out-of-memory error; without a trainer, memory ran out while the base was loaded."""
    marks = MemoryMarks(phase="loading") if trainer is None else trainer.memory.marks
    return explain_out_of_memory(error, config, marks, find_device(), ranks)
