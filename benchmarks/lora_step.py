"""Speed of a LoRA training step compared with PEFT on transformers' Llama, with the same weights, adapters and batch.

    python -m benchmarks.lora_step [--json F]

The model is `nano` (configs/sizes/nano.toml, without the norms on queries and keys that Llama lacks) in fp32, LoRA of rank 16 on
all seven projections of all layers; a step is forward, backward and AdamW on the adapters. transformers attends with PyTorch's
SDPA; neither side recomputes activations. Both run in this process and alternate steps. They are timed only after their losses
and all adapters' gradients agree on one batch, without dropout, for which the two draw different masks.

"ours, plain head" is ours with logits and PyTorch's cross-entropy instead of the chunked loss, to show what that contributes.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from farsight.checkpoints.model_dir.names import TensorNames
from farsight.cli import bounded, command, natural, new_parser, positive
from farsight.configs.finetuning import Base, Lora
from farsight.configs.load import build_config
from farsight.model.adapt.lora import MODULES, add_lora
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.outputs import add_json_option, write_json
from farsight.parallel.device import prepare_device

OURS, PLAIN_HEAD, PEFT = "ours", "ours, plain head", "peft + transformers"
RANK, ALPHA = 16, 32.0
TOLERANCE = 1e-4
"""Relative, for losses; for gradients, the largest difference over the largest value."""
WARM_UP = 2
Batch = tuple[Tensor, Tensor]
"""Tokens [B, L] and their next tokens."""


def our_model(dropout: float, layers: int) -> Llama:
    """`nano` with LoRA. All weights are random, B's too, so that A has gradients."""
    config = build_config(
        {
            "model": {"flavor": "nano"},
            "architecture": {"qk_norm": False, **({"n_layers": layers} if layers else {})},
            "position": {"rotary": {"kind": "rope", "theta": 10000.0}},
        }
    )
    model = build_model(ModelConfig.from_job(config))
    model.init_weights(torch.device("cpu"))
    lora = Lora(rank=RANK, alpha=ALPHA, dropout=dropout)
    add_lora(model, lora, range(len(model.layers)), Base(quantization="none", dtype="float32"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return model.train()


def peft_model(ours: Llama, dropout: float) -> nn.Module:
    """PEFT's model of transformers' Llama, with our weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    a = ours.architecture
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=a.vocab_size, hidden_size=a.dim, intermediate_size=a.ffn_dim, num_hidden_layers=a.n_layers,
            num_attention_heads=a.n_heads, num_key_value_heads=a.n_kv_heads, head_dim=a.head_dim, rms_norm_eps=a.norm_eps,
            tie_word_embeddings=a.tie_embeddings, use_cache=False, attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )  # fmt: skip
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=[*MODULES], task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    known = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(known[our_name(name)])
    return model.train()


def our_name(theirs: str) -> str:
    """`base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight` → `layers.0.attention.wq.lora_A.default.weight`."""
    plain, names = theirs.removeprefix("base_model.model."), TensorNames()
    for part in (".lora_A.default", ".lora_B.default", ".base_layer"):
        if part in plain:
            return names.parts(plain.replace(part, ""))[0].replace(".weight", f"{part}.weight")
    return names.parts(plain)[0]


# ── Losses ────────────────────────────────────────────────────────────────────────────────────────────


def our_loss(model: Llama, batch: Batch) -> Tensor:
    tokens, labels = batch
    return model(tokens, labels=labels) / labels.numel()


def plain_head_loss(model: Llama, batch: Batch) -> Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def peft_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    # It uses `shift_labels` as the next tokens, without shifting them.
    return model(input_ids=tokens, labels=labels, shift_labels=labels, num_items_in_batch=labels.numel()).loss


Loss = Callable[[Any, Batch], Tensor]


def check_agreement(ours: Llama, theirs: nn.Module, losses: dict[str, Loss], batch: Batch) -> dict[str, float]:
    """The largest relative differences of losses and gradients.

    Raises:
        RuntimeError: one is more than the tolerance.
    """
    expected, gradients = _gradients(theirs, losses[PEFT], batch)
    worst = {"loss": 0.0, "gradient": 0.0}
    for name in (OURS, PLAIN_HEAD):
        loss, found = _gradients(ours, losses[name], batch)
        worst["loss"] = max(worst["loss"], abs(loss - expected) / abs(expected))
        for parameter, gradient in gradients.items():
            difference = (found[our_name(parameter)] - gradient).abs().max() / gradient.abs().max()
            worst["gradient"] = max(worst["gradient"], float(difference))
    for what, difference in worst.items():
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"{what} of ours and of peft differ by {difference:.2e} relative, more than {TOLERANCE:g}"
            )
    return worst


def _gradients(model: nn.Module, loss: Loss, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    value = loss(model, batch)
    value.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(value.detach()), found


# ── Timing ────────────────────────────────────────────────────────────────────────────────────────────


def measure(rounds: int, rows: int, seq_len: int, dropouts: list[float], layers: int = 0) -> dict[str, Any]:
    """Medians of `rounds` steps of each, taken in turn, for each dropout.

    Args:
        layers: fewer than `nano` has, for a trial; 0 takes all.
    """
    generator = torch.Generator().manual_seed(1)
    losses: dict[str, Loss] = {OURS: our_loss, PLAIN_HEAD: plain_head_loss, PEFT: peft_loss}
    results, agreement = [], {}
    for dropout in [0.0, *dropouts]:
        ours = our_model(dropout, layers)
        theirs = peft_model(ours, dropout)
        tokens = torch.randint(ours.architecture.vocab_size, (rows, seq_len + 1), generator=generator)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if not agreement:
            agreement = check_agreement(ours, theirs, losses, batch)
        if dropout not in dropouts or any(row["dropout"] == dropout for row in results):
            continue
        models = {OURS: ours, PLAIN_HEAD: ours, PEFT: theirs}
        trained = {name: [p for p in model.parameters() if p.requires_grad] for name, model in models.items()}
        optimizers = {name: torch.optim.AdamW(trained[name], lr=1e-5, fused=True) for name in models}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        bar = tqdm(range(WARM_UP + rounds), desc=f"dropout {dropout:g}", unit="round", leave=False, disable=None)
        for step in bar:
            for name in sorted(models, reverse=step % 2 == 1):
                gc.collect()
                started = time.perf_counter()
                losses[name](models[name], batch).backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
                if step >= WARM_UP:
                    seconds[name].append(time.perf_counter() - started)
        results += _rows(seconds, rows * seq_len, dropout)
    ratios = {f"dropout {row['dropout']:g}": row["ratio"] for row in results if row["what"] == OURS}
    shape = {
        "seq_len": seq_len,
        "batch": rows,
        "rank": RANK,
        "dtype": "float32",
        "rounds": rounds,
        "layers": layers or "all",
    }
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return {
        "rows": results,
        "ratio": min(ratios.values()),
        "ratios": ratios,
        "agreement": agreement,
        **shape,
        **versions,
    }


def _rows(seconds: dict[str, list[float]], tokens: int, dropout: float) -> list[dict[str, Any]]:
    speeds = {name: [tokens / s for s in taken] for name, taken in seconds.items()}
    theirs = statistics.median(speeds[PEFT])
    return [
        {
            "what": name,
            "dropout": dropout,
            "tokens_per_second": statistics.median(own),
            "spread": max(own) - min(own),
            "ratio": statistics.median(own) / theirs,
            # Within a round: a slowdown of the machine affects both steps.
            "paired_ratio": statistics.median(a / b for a, b in zip(own, speeds[PEFT], strict=True)),
        }
        for name, own in speeds.items()
    ]


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.lora_step", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="steps of each that are timed (default: 5)")
    parser.add_argument("--rows", type=positive, default=1, help="sequences in a batch (default: 1)")
    parser.add_argument("--seq-len", type=positive, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument(
        "--dropout",
        type=bounded(float, least=0, below=1),
        nargs="+",
        default=[0.0],
        help="of LoRA's inputs (default: 0)",
    )
    parser.add_argument("--layers", type=natural, default=0, help="fewer than nano's, for a trial")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    prepare_device()
    result = measure(options.rounds, options.rows, options.seq_len, options.dropout, options.layers)
    print(f"{'':<22}{'dropout':>9}{'tokens/s':>11}{'spread':>9}{'of peft':>10}{'round by round':>17}")
    for row in result["rows"]:
        print(
            f"{row['what']:<22}{row['dropout']:>9g}{row['tokens_per_second']:>11,.0f}{row['spread']:>9,.0f}"
            f"{row['ratio']:>9.3f}x{row['paired_ratio']:>16.3f}x"
        )
    worst = result["agreement"]
    print(f"medians of {options.rounds}; losses agree to {worst['loss']:.1e}, gradients to {worst['gradient']:.1e}")
    write_json(options.json, result)


if __name__ == "__main__":
    main()
