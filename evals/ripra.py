"""What RiPRA does with a text: what its layers find relevant, and what sharing positions within a block of a prompt changes.

    farsight ripra MODEL_DIR --data FILE --length 8192 --json F --picture F.png
    farsight ripra MODEL_DIR --passkeys 10 --length 8192 --picture F.png
    farsight ripra MODEL_DIR --data QUESTIONS.jsonl --evidence 1200:1216 5030:5046 --extend ripra:chunk=128

The first --length tokens of the first document are read (0: all of them), and with --evidence of one for each; the last is the
query. With --passkeys the documents are prompts made up by farsight needles, whose evidence is known. Then come out

- the similarity of layers: cosines between the relevance of all chunks to the query in each pair of layers (figure 3 of the
  paper), and of each layer with the anchor whose positions it takes;
- where evidence is known, the relevance of the chunk that holds each document's evidence and of its neighbours, in the last anchor
  layer, and its rank among all chunks (figure 4);
- the error of blocks: how far the positions of a prompt's queries lie from those of their own, and what that does to the logits
  at the same tokens.

Every layer's queries are held while it reads, beside the cache: 8.6 GB for an 8B model at 32,768 tokens in bfloat16.
The method itself is inference/extend/ripra.py, and --extend ripra:KEY=VALUE,… sets it.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farsight import cli
from farsight.cli import positive
from farsight.configs.load import ConfigError
from farsight.data.retrieval.needles import Haystack, passkey
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.files import write_text
from farsight.inference.decoder import Decoder, Rows
from farsight.inference.extend.remapped import RemappedLayer
from farsight.inference.extend.ripra import Allocation, Ripra, chunk_scores, relevance_landscape
from farsight.inference.generate import encode_prompt
from farsight.inference.model_options import LoadedModel, add_model_options, load
from farsight.outputs import add_output_options, check_outputs
from farsight.progress import progress

NEIGHBOURS = 10
"""Chunks on each side of the evidence that are shown."""
SAMPLES = 64
"""Queries whose positions and logits are compared."""


class Observed:
    """A layer's cache that remembers the queries it was given."""

    rotates = True

    def __init__(self, layer: RemappedLayer) -> None:
        self.layer = layer
        self.queries: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Any) -> "Observed":
        self.layer.exchange(k_BLKH, v_BLKH, scopes)
        return self

    def attend(self, q_BLNH: Tensor, *arguments: Any) -> Tensor:
        self.queries.append(q_BLNH[0])
        return self.layer.attend(q_BLNH, *arguments)

    def relevance(self, query: int, chunk: int) -> Tensor:
        """fp64 [C]: of the chunks up to it, to the query at this index."""
        q_NH, keys_TKH = torch.cat(self.queries)[query], self.layer.k_BKTH[0, :, : query + 1].transpose(0, 1).float()
        means_CKH = torch.stack([part.mean(0) for part in keys_TKH.split(chunk)])
        scores_1C = chunk_scores(q_NH[None], means_CKH[None])
        return relevance_landscape(scores_1C, torch.tensor([len(means_CKH)], device=q_NH.device))[0]


def read(decoder: Decoder, tokens_L: Tensor) -> tuple[dict[int, Observed], Tensor]:
    """A sequence read with every layer's queries remembered, and its hidden states [L, D]."""
    rows: Rows = decoder.start([len(tokens_L)])
    observed = {}
    for name, cache in rows.caches.items():
        assert isinstance(cache, RemappedLayer)
        observed[int(name)] = rows.caches[name] = Observed(cache)
    device = rows.batch.device
    bar = progress(total=len(tokens_L), unit="token", desc="read")
    parts = []
    for h_BLD in rows.chunks(tokens_L[None].to(device)):
        parts.append(h_BLD[0])
        bar.update(h_BLD.shape[1])
    bar.close()
    return observed, torch.cat(parts)


def layer_similarity(observed: dict[int, Observed], chunk: int, query: int) -> Tensor:
    """Cosines of the layers' relevance landscapes, fp64 [layers, layers] (appendix C)."""
    landscapes = torch.stack([layer.relevance(query, chunk) for layer in observed.values()])
    return F.cosine_similarity(landscapes[:, None], landscapes[None], dim=-1)


def around_evidence(landscape_C: Tensor, evidence: tuple[int, int], chunk: int) -> dict[str, Any]:
    """Relevance of the chunk in whose middle the evidence lies, and of its neighbours (appendix D).

    Returns:
        "chunk", its "rank" (1 is the most relevant), and "window": 2·NEIGHBOURS + 1 values, None past the ends.
    """
    at = sum(evidence) // 2 // chunk
    values = landscape_C.tolist()
    window = [values[c] if 0 <= c < len(values) else None for c in range(at - NEIGHBOURS, at + NEIGHBOURS + 1)]
    return {"chunk": at, "rank": 1 + sum(value > values[at] for value in values), "window": window}


def own_and_block_positions(layer: Observed, query: int, allocation: Allocation) -> tuple[Tensor, Tensor]:
    """A prompt query's positions as decoding would give them, and those of its block: fp64 [T] each."""

    def positions(asks: int, laid_out: int) -> Tensor:
        landscape_C = layer.relevance(asks, allocation.chunk)
        landscape_1C = F.pad(landscape_C, (0, laid_out // allocation.chunk + 1 - len(landscape_C)))[None]
        query_1 = torch.tensor([laid_out], device=landscape_C.device)
        resolutions = allocation.resolutions(landscape_1C, query_1)
        return allocation.positions(resolutions, query_1, query + 1)[0] - (laid_out - query)

    block = allocation.block_of(query)
    return positions(query, query), positions(allocation.block_begin(block), allocation.block_begin(block + 1) - 1)


def block_error(loaded: LoadedModel, tokens_L: Tensor) -> dict[str, Any]:
    """What blocks of queries change over one at a time, at up to SAMPLES tokens past the limit, evenly spread.

    Returns:
        "positions": mean and largest distance over keys beyond the near window, in tokens, by anchor layer; "logits": mean and
        largest difference, the mean Kullback–Leibler divergence from the exact ones in nats, and how often both have the same
        largest. None where the sequence is within the limit.
    """
    decoder, method = loaded.decoder, _method(loaded)
    allocation = method.allocation(loaded.trained_length)
    last = len(tokens_L) - 2  # the last token is exact either way
    if last <= allocation.limit:
        return {"positions": None, "logits": None}
    samples = torch.linspace(allocation.limit + 1, last, min(SAMPLES, last - allocation.limit)).long().unique().tolist()
    observed, h_LD = read(decoder, tokens_L)
    by_anchor = {}
    if method.relevance == "on":
        for anchor in method.anchor_layers(len(observed)):
            differences = []
            for query in samples:
                own_T, block_T = own_and_block_positions(observed[anchor], query, allocation)
                differences.append((own_T - block_T).abs()[: query - allocation.near])
            every = torch.cat(differences)
            by_anchor[str(anchor)] = {"mean": float(every.mean()), "max": float(every.max())}
    exact = Decoder(decoder.model, decoder.config, dataclasses.replace(method, block=1), decoder.chunk, decoder.name)
    _, exact_LD = read(exact, tokens_L)
    with torch.no_grad():
        ours, theirs = decoder.logits(h_LD[None, samples])[0], decoder.logits(exact_LD[None, samples])[0]
    difference = (ours - theirs).abs()
    divergence = F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
    return {
        "positions": by_anchor,
        "logits": {
            "mean": float(difference.mean()),
            "max": float(difference.max()),
            "divergence": float(divergence),
            "same_largest": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        },
        "block": allocation.block,
        "samples": len(samples),
    }


def diagnose(loaded: LoadedModel, documents: list[Tensor], evidence: list[tuple[int, int]]) -> dict[str, Any]:
    """All of the above, layers' similarity and blocks of the first document.

    Args:
        documents: token ids, the query last.
        evidence: its first token and the one after its last, for each document or none.
    """
    method, layers = _method(loaded), loaded.config.architecture.n_layers
    allocation, anchors = method.allocation(loaded.trained_length), method.anchor_layers(layers)
    observed, _ = read(loaded.decoder, documents[0])
    query = len(documents[0]) - 1
    similarity = layer_similarity(observed, allocation.chunk, query)
    shares = [max(a for a in anchors if a <= layer) for layer in range(layers)]
    windows = []
    for number, span in enumerate(evidence):
        if number:
            observed, _ = read(loaded.decoder, documents[number])
        landscape = observed[anchors[-1]].relevance(len(documents[number]) - 1, allocation.chunk)
        windows.append(around_evidence(landscape, span, allocation.chunk))
    return {
        "tokens": [len(document) for document in documents],
        "trained_length": loaded.trained_length,
        "settings": {**dataclasses.asdict(allocation), "relevance": method.relevance},
        "anchors": list(anchors),
        "similarity": similarity.tolist(),
        "similarity_to_anchor": [float(similarity[layer, anchor]) for layer, anchor in enumerate(shares)],
        "evidence": windows,
        "blocks": block_error(loaded, documents[0]),
    }


def passkey_prompts(tokenizer: Tokenizer, count: int, length: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Prompts of at most `length` tokens that ask for a passkey at evenly spread depths, and the tokens that hold it.

    Raises:
        DataError: too few tokens for a passkey and its question.
    """
    prompts, spans = [], []
    for number in range(count):
        sample = passkey(Haystack(number), tokenizer, length, (number + 0.5) / count)
        ((begin, end),) = sample.evidence
        prompts.append(torch.tensor(encode_prompt(tokenizer, sample.prompt)))
        start, stop = (len(encode_prompt(tokenizer, sample.prompt[:place])) for place in (begin, end))
        spans.append((start, stop))
    return prompts, spans


def _method(loaded: LoadedModel) -> Ripra:
    extension = loaded.decoder.extension
    if not isinstance(extension, Ripra):
        raise ConfigError("--extend: this tool is about RiPRA; write ripra or ripra:KEY=VALUE,…")
    return extension


@cli.command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight ripra", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--data", type=Path, metavar="FILE", help='UTF-8 text, or .jsonl with a "text"')
    texts.add_argument(
        "--passkeys", type=positive, metavar="N", help="this many prompts of --length tokens with a passkey"
    )
    parser.add_argument(
        "--length", type=cli.bounded(int, least=0), default=0, help="tokens of each document that are read; 0 reads all"
    )
    parser.add_argument(
        "--evidence", nargs="+", default=[], metavar="START:END", help="tokens of each document that hold its evidence"
    )
    add_model_options(parser)
    parser.set_defaults(extend="ripra")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    if options.passkeys is not None and (options.length < 1 or options.evidence):
        parser.error("--passkeys goes with --length, and knows its evidence")
    loaded = load(options.model_dir, options)
    _method(loaded)
    if options.passkeys is not None:
        documents, evidence = passkey_prompts(loaded.tokenizer, options.passkeys, options.length)
    else:
        documents = encode_file(options.data, loaded.tokenizer)[: len(options.evidence) or 1]
        documents = [document[: options.length] if options.length else document for document in documents]
        evidence = _spans(options.evidence, documents)
    result = diagnose(loaded, documents, evidence)
    print(table(result))
    if options.json:
        write_text(options.json, json.dumps(result, indent=2) + "\n")
    if options.picture:
        from farsight.evals.ripra_picture import draw

        draw(result, options.picture)
        print(options.picture)


def _spans(texts: list[str], documents: list[Tensor]) -> list[tuple[int, int]]:
    """--evidence as token spans, checked against the documents."""
    if not documents or min(map(len, documents)) < 2:
        raise ConfigError("--data: a document needs at least 2 tokens.")
    if texts and len(texts) != len(documents):
        raise ConfigError(
            f"--evidence names {len(texts)} spans, and there are {len(documents)} documents; give one each."
        )
    spans = []
    for text, document in zip(texts, documents, strict=False):
        start, colon, stop = text.partition(":")
        if not (colon and start.isdigit() and stop.isdigit() and int(start) < int(stop) <= len(document)):
            raise ConfigError(
                f"--evidence {text}: write START:END, tokens from 0 to {len(document):,} of the document."
            )
        spans.append((int(start), int(stop)))
    return spans


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    s, blocks = result["settings"], result["blocks"]
    similar = result["similarity_to_anchor"]
    lines = [
        f"{result['tokens'][0]:,} tokens; limit {s['limit']:,}, near {s['near']:,}, chunk {s['chunk']}, block {s['block']}, "
        f"anchors {', '.join(map(str, result['anchors']))}",
        f"relevance beside the anchor's: cosine {sum(similar) / len(similar):.3f} on average, {min(similar):.3f} at least",
    ]
    for number, found in enumerate(result["evidence"]):
        chunks = -(-result["tokens"][number] // s["chunk"])
        lines.append(
            f"document {number}: evidence in chunk {found['chunk']}, rank {found['rank']} of {chunks} in relevance"
        )
    if blocks["logits"] is None:
        lines.append("within the limit: no positions are changed")
        return "\n".join(lines)
    for anchor, error in blocks["positions"].items():
        lines.append(
            f"blocks, layer {anchor}: positions differ by {error['mean']:.3f} on average, {error['max']:.3f} at most"
        )
    error = blocks["logits"]
    lines.append(
        f"blocks: logits differ by {error['mean']:.4f} on average, {error['max']:.4f} at most; divergence "
        f"{error['divergence']:.2e} nats, the same most likely token {error['same_largest']:.1%} ({blocks['samples']} tokens)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
