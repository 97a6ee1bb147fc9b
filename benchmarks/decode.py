"""Speed of decoding at a long context, compared with a dense cache and a mask, and with transformers' `generate`.

    python -m benchmarks.decode [--length 16384] [--json F]

The model is `nano` (configs/sizes/nano.toml) in fp32, with random weights; its caches are filled with random keys and values,
the same ones for both sides, instead of by reading a prompt. Both sides run in this process and alternate, decoding one row
greedily. They are timed only after their logits of a step, or their tokens, agree.

"SCOPE": a rolling cache, compared with the same model whose cache keeps every token for every head and masks. "RoPE": all
heads dense, compared with `transformers` and its own cache on the exported directory.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.cli import command, natural, new_parser, positive
from farsight.configs.load import build_config
from farsight.inference.decoder import Decoder, Rows
from farsight.inference.kv_cache import RollingLayer
from farsight.inference.sampling import GREEDY, choose
from farsight.kernels.scoped_attention import RollingCache
from farsight.model.build import ModelConfig, build_model
from farsight.outputs import add_json_option, write_json

WARM_UP = 2
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit."""
Write = Callable[[int], list[int]]
"""Writes the given number of tokens and returns them."""


def make_decoder(position: dict[str, Any], length: int, architecture: dict[str, int]) -> Decoder:
    """`nano` with random weights, trained for `length` tokens; `architecture` replaces some of its shapes."""
    config = build_config(
        {
            "model": {"flavor": "nano"},
            "architecture": architecture,
            "position": position,
            "training": {"seq_len": length},
        }
    )
    model_config = ModelConfig.from_job(config)
    model = build_model(model_config)
    model.init_weights(torch.device("cpu"))
    return Decoder(model.eval(), model_config)


def layer_contents(layer: int, length: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Random keys and values [1, L, K, H] of a layer, the same at every call."""
    generator = torch.Generator().manual_seed(layer)
    keys, values = (torch.randn(1, length, kv_heads, head_dim, generator=generator) for _ in range(2))
    return keys, values


def start(decoder: Decoder, length: int, new_tokens: int, dense: bool = False) -> Rows:
    """A sequence of `length` tokens whose cache is filled; with `dense`, it keeps every token for every head."""
    rows, a = decoder.start([length], new_tokens), decoder.model.architecture
    for number, layer in enumerate(rows.caches.values()):
        assert isinstance(layer, RollingLayer)
        if dense:
            everything = [length + new_tokens] * a.n_heads
            layer.cache = RollingCache(everything, a.n_kv_heads, length + new_tokens, 1, a.head_dim)
        layer.cache.append(*layer_contents(number, length, a.n_kv_heads, a.head_dim))
        layer.tokens = length
    rows.tokens = length
    rows.columns_11.fill_(length)
    return rows


def writer(rows: Rows, first: int) -> Write:
    """Our decoding, starting with the token `first`."""
    token = torch.tensor([first])

    def write(count: int) -> list[int]:
        nonlocal token
        written = []
        for _ in range(count):
            token = choose(rows.decoder.logits(rows.read(token[:, None]))[:, -1], GREEDY, ())
            written.append(int(token))
        return written

    return write


def transformers_writer(decoder: Decoder, length: int, first: int) -> tuple[Write, Callable[[], int]]:
    """Decoding by transformers' `generate` on the exported directory, from the same cache; and a function that returns the cache's bytes."""
    from transformers import AutoModelForCausalLM, DynamicCache

    a = decoder.model.architecture
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        write_model_dir(directory, decoder.config, dict(decoder.model.named_parameters()))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cache = DynamicCache()
    for layer in range(a.n_layers):
        keys, values = layer_contents(layer, length, a.n_kv_heads, a.head_dim)
        cache.update(keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous(), layer)
    ids = torch.zeros(1, length + 1, dtype=torch.int64)
    ids[0, -1] = first

    def write(count: int) -> list[int]:
        nonlocal ids
        before = ids.shape[1]
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return ids[0, before:].tolist()

    return write, lambda: sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def time_in_turn(writers: dict[str, Write], tokens: int, rounds: int, bar: tqdm) -> dict[str, list[float]]:
    """Tokens a second in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(WARM_UP + rounds):
        for name in sorted(writers, reverse=number % 2 == 1):
            gc.collect()
            started = time.perf_counter()
            writers[name](tokens)
            if number >= WARM_UP:
                speeds[name].append(tokens / (time.perf_counter() - started))
        bar.update()
    return speeds


def rows_of(
    what: str, length: int, speeds: dict[str, list[float]], baseline: str, nbytes: dict[str, int]
) -> list[dict]:
    """The figures of one comparison."""
    theirs = speeds[baseline]
    return [
        {
            "what": what, "cache": name, "length": length,
            "tokens_per_second": statistics.median(own), "spread": max(own) - min(own), "cache_bytes": nbytes[name],
            "ratio": statistics.median(own) / statistics.median(theirs),
            # Within a round: a slowdown of the machine affects both turns.
            "paired_ratio": statistics.median(a / b for a, b in zip(own, theirs, strict=True)),
        }
        for name, own in speeds.items()
    ]  # fmt: skip


@torch.no_grad()
def measure(
    length: int, tokens: int, rounds: int, architecture: dict[str, int], layouts: Sequence[str] = ("sorted",)
) -> dict[str, Any]:
    """Medians of `rounds` turns of `tokens` tokens each.

    Raises:
        RuntimeError: the two sides of a comparison do not agree.
    """
    most, results, worst = (WARM_UP + rounds + 1) * tokens + 1, [], 0.0
    with tqdm(total=(1 + len(layouts)) * (WARM_UP + rounds), unit="round", leave=False, disable=None) as bar:
        for layout in layouts:
            bar.set_description(f"SCOPE, {layout}")
            decoder = make_decoder({"heads": {"kind": "scope", "layout": layout}}, length, architecture)
            both = {"rolling": start(decoder, length, most), "dense and mask": start(decoder, length, most, dense=True)}
            logits = [decoder.logits(rows.read(torch.tensor([[1]]))) for rows in both.values()]
            worst = max(worst, float((logits[0] - logits[1]).abs().max() / logits[1].abs().max()))
            if not worst <= TOLERANCE:
                raise RuntimeError(f"logits with the rolling and the dense cache differ by {worst:.1e} of the largest")
            nbytes = {name: rows.nbytes for name, rows in both.items()}
            speeds = time_in_turn({name: writer(rows, 2) for name, rows in both.items()}, tokens, rounds, bar)
            results += rows_of(f"SCOPE, {layout}", length, speeds, "dense and mask", nbytes)
            del both, decoder
            gc.collect()
        bar.set_description("RoPE")
        decoder = make_decoder({"rotary": {"kind": "rope", "theta": 10000.0}}, length, architecture)
        rows = start(decoder, length, most)
        write, theirs = transformers_writer(decoder, length, 1)
        writers = {"rolling": writer(rows, 1), "transformers": write}
        first = {name: write(tokens) for name, write in writers.items()}
        if first["rolling"] != first["transformers"]:
            raise RuntimeError(f"tokens differ: {first['rolling']} and, of transformers, {first['transformers']}")
        speeds = time_in_turn(writers, tokens, rounds, bar)
        results += rows_of("RoPE", length, speeds, "transformers", {"rolling": rows.nbytes, "transformers": theirs()})
    shape = {
        "length": length,
        "tokens": tokens,
        "rounds": rounds,
        "layers": architecture.get("n_layers", "all"),
        "dtype": "float32",
    }
    return {
        "rows": results, "logits_agree_to": worst, **shape,
        "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.decode", __doc__)
    parser.add_argument("--length", type=positive, default=16384, help="tokens in the cache (default: 16384)")
    parser.add_argument("--tokens", type=positive, default=16, help="tokens of a turn (default: 16)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each that are timed (default: 5)")
    parser.add_argument("--layers", type=natural, default=0, help="fewer than nano's, for a trial")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if min(options.length, options.tokens, options.rounds) < 1:
        parser.error("--length, --tokens and --rounds take 1 or more")
    layouts = ("sorted", "interleaved", "group_balanced")
    fewer = {"n_layers": options.layers} if options.layers else {}
    result = measure(options.length, options.tokens, options.rounds, fewer, layouts)
    print(f"{'':<24}{'cache':<16}{'MiB':>9}{'tokens/s':>11}{'spread':>9}{'ratio':>9}{'turn by turn':>15}")
    for row in result["rows"]:
        print(
            f"{row['what']:<24}{row['cache']:<16}{row['cache_bytes'] / 2**20:>9,.0f}{row['tokens_per_second']:>11,.2f}"
            f"{row['spread']:>9,.2f}{row['ratio']:>8.3f}x{row['paired_ratio']:>14.3f}x"
        )
    print(
        f"{options.length:,} tokens in the cache, medians of {options.rounds}; logits agree to {result['logits_agree_to']:.1e}"
    )
    write_json(options.json, result)


if __name__ == "__main__":
    main()
