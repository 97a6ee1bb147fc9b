"""Decodes with an 8B-shaped model at long contexts, dense and with SCOPE's heads, with CUDA graphs and without.

    python -m benchmarks.gpu.decoding --json F

Weights and the cache's contents are random, in bf16; tokens are chosen greedily. The bandwidth is that of the bytes a step has to
read, weights and cache, which bounds it.
"""

import sys
import time
from functools import partial
from typing import Any

import torch

from farsight.benchmarks.gpu.part import Rows, part_parser
from farsight.benchmarks.gpu.runs import MODELS
from farsight.cli import command, positive
from farsight.configs.load import build_config
from farsight.inference.decoder import Decoder
from farsight.inference.decoder import Rows as Sequences
from farsight.inference.kv_cache import RollingLayer
from farsight.inference.sampling import GREEDY
from farsight.inference.step import WARM_UP, Step, written
from farsight.model.build import ModelConfig, build_model

TOKENS = 64


@torch.no_grad()
def make_decoder(flavor: str, scope: bool, length: int, device: str) -> Decoder:
    """A model of random weights, made for `length` tokens."""
    position = {"heads": {"kind": "scope"}} if scope else {}
    own = {"model": {"flavor": flavor}, "training": {"seq_len": length}, "position": position}
    config = ModelConfig.from_job(build_config(own))
    with torch.device("meta"):
        model = build_model(config).bfloat16()
    model.to_empty(device=device)
    model.init_weights(torch.device(device))
    return Decoder(model.eval(), config)


def filled(decoder: Decoder, length: int, batch: int, new_tokens: int) -> Sequences:
    """Rows of `length` tokens with random keys and values."""
    rows = decoder.start([length] * batch, new_tokens)
    for layer in rows.caches.values():
        assert isinstance(layer, RollingLayer)
        layer.cache.keys_BSH.normal_()
        layer.cache.values_BSH.normal_()
        layer.cache.tokens.fill_(length)
        layer.tokens = length
    rows.tokens = length
    rows.columns_11.fill_(length)
    return rows


@torch.no_grad()
def tokens_per_second(decoder: Decoder, length: int, batch: int, graph: bool, count: int) -> dict[str, Any]:
    """Tokens per second of all rows, after the warm-up."""
    rows = filled(decoder, length, batch, WARM_UP + 3 + count)
    device = rows.batch.device
    logits_BV = torch.zeros(batch, decoder.model.architecture.vocab_size, device=device)
    step = Step(rows, logits_BV, logits_BV.shape[1])
    if not graph:
        step._graph, step.capturable = None, False
    for _ in range(WARM_UP + 2):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in written(step, count, GREEDY, ()):
        pass
    seconds = (time.perf_counter() - begin) / count
    weights = sum(x.nbytes for name, x in decoder.model.named_parameters() if "tok_embeddings" not in name)
    return {
        "tokens_per_second": batch / seconds, "ms": 1e3 * seconds, "cache_bytes": rows.nbytes,
        "dense_cache_bytes": rows.dense_nbytes, "tbytes_per_second": (weights + rows.nbytes) / seconds / 1e12,
    }  # fmt: skip


@command
def main(argv: list[str] | None = None) -> int:
    parser = part_parser("decoding", __doc__)
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[32768, 131072], metavar="T", help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    rows = Rows(options, "decoding")
    lengths, flavor, count = ([64], "tiny", 4) if rows.small else (options.lengths, "8b", TOKENS)
    for length in lengths:
        for name, scope in MODELS:
            make = partial(make_decoder, flavor, scope, length + WARM_UP + 3 + count, rows.device)
            if (decoder := rows.attempt(f"{name}, T = {length:,}", make)) is None:
                continue
            for batch, graph in ((1, True), (1, False), (4, True)):  # 8 dense rows of 131,072 tokens take 143 GiB
                measure = partial(tokens_per_second, decoder, length, batch, graph, count)
                if (found := rows.attempt(f"{name}, T = {length:,}, {batch} rows, graph {graph}", measure)) is not None:
                    rows.add(model=flavor, heads=name, T=length, batch=batch, graph=graph, **found)
            del decoder
    return rows.end()


if __name__ == "__main__":
    sys.exit(main())
