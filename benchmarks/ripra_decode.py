"""Tokens a second of decoding far past the trained length: the plain model, Self-Extend and RiPRA on the same model.

    python -m benchmarks.ripra_decode [--contexts 12288 16384 24576 32768] [--json F]

The model is `nano` (configs/sizes/nano.toml) with four query heads to a key-value head, trained on 8,192 tokens as far as the
methods know: RiPRA's limit is 4,096 positions, its near window 1,024. Weights are random, and random keys and values stand in
for a prompt, whose reading is not timed. All three run in this process and alternate tokens. They are timed only after each
decodes the same logits as it gets by reading, on short sequences within the trained window and past it.

The plain model rotates a key once; Self-Extend and RiPRA rotate every key at every step, RiPRA by positions that it has to
compute first. The paper's overhead of 3.2 to 6.7 % (Table 7) is over Self-Extend.
"""

import statistics
import time
from typing import Any

import torch
from tqdm import tqdm

from farsight.cli import command, natural, new_parser, positive
from farsight.configs.load import build_config
from farsight.inference.decoder import Decoder, Rows
from farsight.inference.extend.ripra import Ripra
from farsight.inference.extend.self_extend import SelfExtend
from farsight.inference.kv_cache import RollingLayer
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.outputs import add_json_option, write_json
from farsight.parallel.device import prepare_device

PLAIN, SELF_EXTEND, RIPRA = "plain", "self_extend", "ripra"
EXTENSIONS = {PLAIN: None, SELF_EXTEND: SelfExtend(), RIPRA: Ripra()}
TRAINED = 8192
TOLERANCE = 1e-3
"""Largest difference between logits, which vary by about 1."""
WARM_UP = 2


def model_of(layers: int, trained: int, device: torch.device) -> tuple[Llama, ModelConfig]:
    """`nano` with `layers` layers (0: its own number) and grouped-query attention."""
    config = ModelConfig.from_job(
        build_config(
            {
                "model": {"flavor": "nano"},
                "architecture": {"n_kv_heads": 4, **({"n_layers": layers} if layers else {})},
                "training": {"seq_len": trained},
                "position": {"rotary": {"kind": "rope", "theta": 500000.0}},
            }
        )
    )
    with device:
        model = build_model(config)
    model.init_weights(device)
    return model.eval(), config


@torch.no_grad()
def check(device: torch.device) -> float:
    """Largest difference between the logits of decoded tokens and those of the same tokens read as a prompt.

    Raises:
        RuntimeError: it is more than the tolerance.
    """
    model, config = model_of(2, 64, device)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for length in (30, 200):
        tokens = torch.randint(config.architecture.vocab_size, (length,), generator=generator).to(device)
        for extension in (None, SelfExtend(), Ripra(chunk=16, block=1)):
            decoder = Decoder(model, config, extension)
            read = decoder.logits(decoder.hidden_states(tokens))
            if length <= 30 and extension is not None:
                plain = Decoder(model, config)
                worst = max(worst, float((read - plain.logits(plain.hidden_states(tokens))).abs().max()))
            rows = decoder.start([length - 8], 8)
            list(rows.chunks(tokens[None, :-8]))
            decoded = [decoder.logits(rows.read(token[None, None]))[0, 0] for token in tokens[-8:]]
            worst = max(worst, float((torch.stack(decoded) - read[-8:]).abs().max()))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"logits of decoded and read tokens differ by {worst:.2e}, more than {TOLERANCE:g}")
    return worst


def filled(decoder: Decoder, context: int, new_tokens: int) -> Rows:
    """A row that has read `context` tokens, with random keys and values."""
    rows, a = decoder.start([context], new_tokens), decoder.config.architecture
    generator = torch.Generator(rows.batch.device).manual_seed(0)
    for cache in rows.caches.values():
        shape = 1, context, a.n_kv_heads, a.head_dim
        k, v = (
            torch.randn(shape, generator=generator, device=rows.batch.device, dtype=rows.batch.dtype) for _ in range(2)
        )
        if isinstance(cache, RollingLayer):
            cache.cache.append(k, v)
        else:
            cache.exchange(k, v, ())
    rows.tokens = context
    rows.columns_11.fill_(context)
    return rows


@torch.no_grad()
def measure(contexts: list[int], rounds: int, layers: int, device: torch.device) -> dict[str, Any]:
    """Medians of `rounds` tokens of each, taken in turn, for each context.

    Args:
        layers: fewer than `nano` has, for a trial; 0 takes all.
    """
    agreement = check(device)
    model, config = model_of(layers, TRAINED, device)
    results = []
    for context in contexts:
        rows = {
            name: filled(Decoder(model, config, extension), context, WARM_UP + rounds)
            for name, extension in EXTENSIONS.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        bar = tqdm(range(WARM_UP + rounds), desc=f"{context:,} tokens", unit="round", leave=False, disable=None)
        for step in bar:
            for name in sorted(rows, reverse=step % 2 == 1):
                _wait(device)
                started = time.perf_counter()
                rows[name].decoder.logits(rows[name].read(token))
                _wait(device)
                if step >= WARM_UP:
                    seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        results += [
            {
                "context": context,
                "what": name,
                "tokens_per_second": 1 / medians[name],
                "median_s": medians[name],
                "spread_s": max(seconds[name]) - min(seconds[name]),
                "over_plain": medians[name] / medians[PLAIN] - 1,
                "over_self_extend": medians[name] / medians[SELF_EXTEND] - 1,
                # Within a round: a slowdown of the machine affects both tokens.
                "over_self_extend_by_round": statistics.median(
                    own / other - 1 for own, other in zip(seconds[name], seconds[SELF_EXTEND], strict=True)
                ),
                "cache_bytes": rows[name].nbytes,
            }
            for name in rows
        ]
    return {
        "rows": results,
        "agreement": agreement,
        "layers": len(model.layers),
        "rounds": rounds,
        "device": str(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.ripra_decode", __doc__)
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[12288, 16384, 24576, 32768],
        help="tokens before those that are timed",
    )
    parser.add_argument("--rounds", type=positive, default=15, help="tokens of each that are timed (default: 15)")
    parser.add_argument("--layers", type=natural, default=0, help="fewer than nano's, for a trial")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    prepare_device()
    result = measure(options.contexts, options.rounds, options.layers, torch.device(options.device))
    print(f"{'context':>9}  {'':<12}{'ms/token':>10}{'tokens/s':>10}{'over plain':>12}{'over self_extend':>18}")
    for row in result["rows"]:
        print(
            f"{row['context']:>9,}  {row['what']:<12}{1000 * row['median_s']:>10.1f}{row['tokens_per_second']:>10.2f}"
            f"{row['over_plain']:>12.1%}{row['over_self_extend']:>18.1%}"
        )
    print(f"medians of {options.rounds}; logits of read and decoded tokens agree to {result['agreement']:.1e}")
    write_json(options.json, result)


if __name__ == "__main__":
    main()
