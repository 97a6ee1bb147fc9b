"""The tokens that RiPRA finds relevant in a text, and the error of sharing positions within blocks of a prompt.

Shape suffixes: L tokens, D model, T keys, N query heads, K key-value heads, H head dim, C chunks.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farsight.data.retrieval.needles import Haystack, passkey
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder, Rows
from farsight.inference.extend.remapped import RemappedLayer
from farsight.inference.extend.ripra import Allocation, Ripra, chunk_scores, relevance_landscape
from farsight.inference.generate.completions import encode_prompt
from farsight.inference.loading import LoadedModel
from farsight.model.context import PassThrough
from farsight.progress import progress

NEIGHBOURS = 10
"""Chunks shown on each side of the evidence."""
SAMPLES = 64
"""Queries whose positions and logits are compared."""


class Observed(PassThrough):
    """Wraps a layer's cache and records its queries."""

    def __init__(self, layer: RemappedLayer) -> None:
        super().__init__(layer)
        self.layer = layer
        self.queries: list[Tensor] = []

    def pass_queries(self, q_BLNH: Tensor) -> Tensor:
        self.queries.append(q_BLNH[0])
        return q_BLNH

    def relevance(self, query: int, chunk: int) -> Tensor:
        """Relevance of the chunks up to a query to the query at this index, fp64 [C]."""
        q_NH, keys_TKH = torch.cat(self.queries)[query], self.layer.k_BKTH[0, :, : query + 1].transpose(0, 1).float()
        means_CKH = torch.stack([part.mean(0) for part in keys_TKH.split(chunk)])
        scores_1C = chunk_scores(q_NH[None], means_CKH[None])
        return relevance_landscape(scores_1C, torch.tensor([len(means_CKH)], device=q_NH.device))[0]


def read(decoder: Decoder, tokens_L: Tensor) -> tuple[dict[int, Observed], Tensor]:
    """Reads a sequence, recording every layer's queries; returns the layers and the hidden states [L, D]."""
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
    """Relevance of the chunk that holds the middle of the evidence, and of its neighbours (appendix D).

    Returns:
        "chunk", its "rank" (1 is the most relevant), and "window": 2·NEIGHBOURS + 1 values, None past the ends.
    """
    at = sum(evidence) // 2 // chunk
    values = landscape_C.tolist()
    window = [values[c] if 0 <= c < len(values) else None for c in range(at - NEIGHBOURS, at + NEIGHBOURS + 1)]
    return {"chunk": at, "rank": 1 + sum(value > values[at] for value in values), "window": window}


def own_and_block_positions(layer: Observed, query: int, allocation: Allocation) -> tuple[Tensor, Tensor]:
    """A prompt query's positions as decoding would give them, and as its block gives them: fp64 [T] each."""

    def positions(asks: int, laid_out: int) -> Tensor:
        """Positions by the relevance to query `asks`, laid out for query `laid_out`."""
        landscape_C = layer.relevance(asks, allocation.chunk)
        landscape_1C = F.pad(landscape_C, (0, laid_out // allocation.chunk + 1 - len(landscape_C)))[None]
        query_1 = torch.tensor([laid_out], device=landscape_C.device)
        resolutions = allocation.resolutions(landscape_1C, query_1)
        return allocation.positions(resolutions, query_1, query + 1)[0] - (laid_out - query)

    block = allocation.block_of(query)
    return positions(query, query), positions(allocation.block_begin(block), allocation.block_begin(block + 1) - 1)


def block_error(loaded: LoadedModel, tokens_L: Tensor) -> dict[str, Any]:
    """Error of reading queries in blocks instead of one at a time, at up to SAMPLES evenly spaced tokens past the limit.

    Returns:
        "positions": mean and largest difference over keys beyond the near window, in tokens, by anchor layer; "logits": mean and
        largest difference, the mean Kullback–Leibler divergence from the exact logits in nats, and how often both have the same
        largest one. None where the sequence is within the limit.
    """
    decoder, method = loaded.decoder, check_extension(loaded)
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
    exact = type(decoder)(
        decoder.model, decoder.config, dataclasses.replace(method, block=1), decoder.chunk, decoder.name
    )
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
            "divergence": max(0.0, float(divergence)),  # rounding may leave it a little below
            "same_largest": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        },
        "block": allocation.block,
        "samples": len(samples),
    }


def diagnose(loaded: LoadedModel, documents: list[Tensor], evidence: list[tuple[int, int]]) -> dict[str, Any]:
    """All diagnostics; the similarity of layers and the error of blocks are the first document's.

    Args:
        documents: token ids; the last token is the query.
        evidence: start and stop of its tokens, for every document or for none.

    Returns:
        The figures; "similarity" and "similarity_to_anchor" are None where the first document is a single chunk, which leaves no
        relevance to compare.
    """
    method, layers = check_extension(loaded), loaded.config.architecture.n_layers
    allocation, anchors = method.allocation(loaded.trained_length), method.anchor_layers(layers)
    observed, _ = read(loaded.decoder, documents[0])
    query = len(documents[0]) - 1
    similarity = layer_similarity(observed, allocation.chunk, query) if query >= allocation.chunk else None
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
        "similarity": None if similarity is None else similarity.tolist(),
        "similarity_to_anchor": None
        if similarity is None
        else [float(similarity[layer, anchor]) for layer, anchor in enumerate(shares)],
        "evidence": windows,
        "blocks": block_error(loaded, documents[0]),
    }


def passkey_prompts(tokenizer: Tokenizer, count: int, length: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Prompts of at most `length` tokens with passkeys at evenly spaced depths, and the span of tokens that holds each passkey.

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


def check_extension(loaded: LoadedModel) -> Ripra:
    """The model's extension.

    Raises:
        ConfigError: it is not RiPRA.
    """
    extension = loaded.decoder.extension
    if not isinstance(extension, Ripra):
        raise ConfigError("--extend: this tool is about RiPRA; write ripra or ripra:KEY=VALUE,…")
    return extension


def read_spans(texts: list[str], documents: list[Tensor]) -> list[tuple[int, int]]:
    """--evidence as token spans, checked against the documents.

    Raises:
        ConfigError: spans that are not START:END within their documents, or not one for each.
    """
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


def smaller_chunk(result: dict[str, Any]) -> str:
    """The setting that divides the first document into several chunks, where it is a single one."""
    tokens = result["tokens"][0]
    return f"set chunk below {tokens:,}, as in --extend ripra:chunk={max(1, tokens // 8)}"


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    s, blocks = result["settings"], result["blocks"]
    similar = result["similarity_to_anchor"]
    compared = f"the whole text is one chunk, so there is no relevance to compare; {smaller_chunk(result)}"
    if similar is not None:
        compared = f"relevance beside the anchor's: cosine {sum(similar) / len(similar):.3f} on average, {min(similar):.3f} at least"
    lines = [
        f"{result['tokens'][0]:,} tokens; limit {s['limit']:,}, near {s['near']:,}, chunk {s['chunk']}, block {s['block']}, "
        f"anchors {', '.join(map(str, result['anchors']))}",
        compared,
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
