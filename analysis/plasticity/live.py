"""Positional bias and attention plasticity of a model during training.

Every time, the model reads the same held-out sequences in the run's parallel layout, and queries and keys of a few heads per
layer are recorded. Data-parallel ranks divide the sequences; within a sequence, each rank records the tokens, heads and layers
that it holds. Each sampled query and key is then on exactly one rank, so a sum over all ranks assembles them without rounding,
whatever the layout. The heads are then divided over the ranks and measured as by farsight geometry and farsight plasticity.

Shapes: S sequences, L tokens of one, T sampled tokens of all, N measured heads, H head dim.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from farsight.analysis.capture.heads import Head, describe_head
from farsight.analysis.capture.recorder import Recorder, recording
from farsight.analysis.capture.sampling import draw_tokens
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.analysis.plasticity.heads import head_profile
from farsight.analysis.plasticity.options import AP, DRAWS
from farsight.analysis.plasticity.summary import bands, mean, overall, without_nan
from farsight.configs.schema import JobConfig
from farsight.data.loader import Loader
from farsight.data.packing import IGNORE
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.model.attention import Attention
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.parallel.batch import model_inputs
from farsight.parallel.halo import Context
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.parallelize import release_gathered
from farsight.parallel.pipeline import Pipeline

FIGURES = ("bias_strength", "bias_context", *AP)


class PlasticityMetrics:
    """Measures a run's model on fixed held-out sequences.

    Raises:
        DataError: no held-out documents.
    """

    def __init__(
        self,
        config: JobConfig,
        dims: ParallelDims,
        tokenizer: Tokenizer,
        device: torch.device,
        context: Context | None,
        pipeline: Pipeline | None,
    ) -> None:
        self.config, self.device, self.context, self.pipeline = config, device, context, pipeline
        m, self.length = config.metrics, config.training.seq_len
        self.heads = draw_heads_of_layers(ModelConfig.from_job(config), self.length, m.plasticity_heads)
        self.tokens_SL = held_out_sequences(config, tokenizer)
        S = m.plasticity_sequences
        drawn = [draw_tokens(self.length, m.plasticity_buckets, m.plasticity_tokens, number) for number in range(S)]
        self.positions_T = torch.cat(drawn)
        self.sequences_T = torch.cat([torch.full_like(columns, number) for number, columns in enumerate(drawn)])
        batch = dims.mesh("batch")
        rank, ranks = (batch.get_local_rank(), batch.size()) if batch is not None else (0, 1)
        self.batches = rows_of_rank(S, rank, ranks, config.training.local_batch_size, whole=pipeline is not None)

    def measure(
        self, model_parts: Sequence[nn.Module], around: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float | None]:
        """FIGURES of the model and, as "name.layer", of each layer: means over the measured heads that have a value, else None.

        All ranks must call it.

        Args:
            around: makes the context manager for a forward pass.
        """
        qk_NT2H = self._gathered(model_parts, around)
        found = torch.zeros(len(self.heads), len(FIGURES), dtype=torch.float64)
        for number in range(dist.get_rank(), len(self.heads), dist.get_world_size()):
            found[number] = torch.tensor(self._head(number, *qk_NT2H[number].double().unbind(1)), dtype=torch.float64)
        figures_NF = _sum(found.to(self.device)).cpu()
        rows: dict[str, list[Tensor]] = {"": list(figures_NF)}
        for head, row in zip(self.heads, figures_NF, strict=True):
            rows.setdefault(f".{head.layer}", []).append(row)
        return {
            name + of: mean(without_nan(float(row[column]) for row in some))
            for of, some in rows.items()
            for column, name in enumerate(FIGURES)
        }

    def _head(self, number: int, q_TH: Tensor, k_TH: Tensor) -> list[float]:
        """FIGURES of a head, NaN for those it doesn't have."""
        head, buckets = self.heads[number], self.config.metrics.plasticity_buckets
        strength = planar_rotation(q_TH, k_TH, self.positions_T).bias_strength
        profile = head_profile(
            q_TH,
            k_TH,
            self.positions_T,
            self.sequences_T,
            length=self.length,
            buckets=buckets,
            scope=head.scope,
            slope=head.slope,
            draws=DRAWS,
            seed=number,
        )
        values = without_nan(profile.plasticity)
        ap = {"ap_overall": overall(values, profile.queries), **bands(values)}
        of_position = [ap[name] for name in AP]
        return [strength, strength * self.length, *(torch.nan if x is None else x for x in of_position)]

    @torch.no_grad()
    def _gathered(self, model_parts: Sequence[nn.Module], around: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        """Queries and keys of all heads and sampled tokens, on every rank's host: fp32 [N, T, 2, H]."""
        qk_NT2H = torch.zeros(
            len(self.heads),
            len(self.positions_T),
            2,
            self.config.architecture.head_dim,
            device=self.device,
        )
        attentions = {int(n): a for part in model_parts for n, a in cast(Llama, part).attentions()}
        place_L = self._places()
        for part in model_parts:
            part.eval()
        for rows in self.batches:
            row_of = torch.full((len(self.tokens_SL) + 1,), -1)  # the last entry is for padding
            row_of[list(rows)] = torch.arange(len(rows))
            at_T, here_T = row_of[self.sequences_T], place_L[self.positions_T]
            kept = torch.nonzero((at_T >= 0) & (here_T >= 0))[:, 0]
            at, here = at_T[kept].to(self.device), here_T[kept].to(self.device)
            tokens_BL = self.tokens_SL[[row % len(self.tokens_SL) for row in rows]].to(self.device)
            with around(), ExitStack() as stack:
                for part in model_parts:
                    stack.enter_context(uncompiled(part))
                if self.pipeline is not None and rows is self.batches[0]:
                    # After training steps, a schedule first runs its stages an extra time to infer shapes; do that unrecorded.
                    self._read(model_parts, tokens_BL)
                recorders = stack.enter_context(recording(attentions, at, here))
                self._read(model_parts, tokens_BL)
            if any(recorder.seen != len(rows) for recorder in recorders.values()):
                raise RuntimeError(
                    "layers were called with a different number of rows than the batch has: set metrics.plasticity_freq = 0"
                )
            for number, head in enumerate(self.heads):
                if head.layer in attentions:
                    self._keep(qk_NT2H[number], kept, head, attentions[head.layer], recorders[head.layer])
        for part in model_parts:
            part.train()
            release_gathered(part)
        return _sum(qk_NT2H).cpu()

    def _read(self, model_parts: Sequence[nn.Module], tokens_BL: Tensor) -> None:
        """Runs the model on rows as one document each, whether or not the run masks documents."""
        batch = {
            "input": tokens_BL,
            "positions": torch.arange(self.length, device=self.device)[None],
            "document_starts": torch.zeros_like(tokens_BL, dtype=torch.int32),
        }
        inputs = model_inputs(self.config, self.context, batch, torch.full_like(tokens_BL, IGNORE))
        if self.pipeline is not None:
            self.pipeline.evaluate(inputs)
        else:
            model_parts[0](**inputs)

    def _places(self) -> Tensor:
        """The index of each token of a sequence among this rank's tokens, or -1 if another rank holds it: int64 [L]."""
        every_1L = torch.arange(self.length)[None]
        own = (every_1L if self.context is None else self.context.own(every_1L))[0]
        place_L = torch.full((self.length,), -1)
        place_L[own] = torch.arange(len(own))
        return place_L

    @staticmethod
    def _keep(qk_T2H: Tensor, kept: Tensor, head: Head, attention: Attention, recorder: Recorder) -> None:
        """Copies a head's recorded queries and keys, if this rank holds the head."""
        begin, end = attention.heads.start, attention.heads.stop
        if begin <= head.head < end:
            places = kept.to(qk_T2H.device)
            qk_T2H[places, 0] = recorder.queries_TNH[:, head.head - begin].float()
            qk_T2H[places, 1] = recorder.keys_TKH[:, head.kv_head - begin // attention.group].float()


def draw_heads_of_layers(config: ModelConfig, length: int, many: int) -> list[Head]:
    """Draws `many` query heads of every layer, uniformly; the same at every step and on every rank."""
    layers, n_heads = config.layers(length), config.architecture.n_heads
    draw = random.Random(0)
    return [
        describe_head(config, layers, layer, head, length)
        for layer in range(len(layers))
        for head in sorted(draw.sample(range(n_heads), many))
    ]


def held_out_sequences(config: JobConfig, tokenizer: Tokenizer) -> Tensor:
    """The sequences to measure on, filled with held-out documents one after the other: int64 [S, L].

    Raises:
        DataError: no held-out documents.
    """
    S = config.metrics.plasticity_sequences
    loader = Loader(
        config.data,
        tokenizer,
        seq_len=config.training.seq_len,
        vocab_size=config.architecture.vocab_size or tokenizer.vocab_size,
        global_batch_size=S,
        micro_batch_size=S,
        dp_rank=0,
        dp_world_size=1,
        split="validation",
    )
    loader.most = 1
    inputs, _ = next(iter(loader))
    loader.close()
    return inputs["input"].clone()


def rows_of_rank(sequences: int, rank: int, ranks: int, most: int, whole: bool) -> list[list[int]]:
    """Batches of sequence numbers for a data-parallel rank: equally many on all ranks, padded with the number `sequences`.

    Args:
        most: rows per batch, at most.
        whole: every batch must have exactly `most` rows.
    """
    each = -(-sequences // ranks)
    size = most if whole else min(most, each)
    batches = -(-each // size)
    own = [row for row in range(rank * each, (rank + 1) * each) if row < sequences]
    own += [sequences] * (batches * size - len(own))
    return [own[begin : begin + size] for begin in range(0, batches * size, size)]


def _sum(values: Tensor) -> Tensor:
    """Sums over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


@contextmanager
def uncompiled(part: nn.Module) -> Iterator[None]:
    """Runs blocks uncompiled inside this context, since a recorder in them would trigger a recompilation.

    Only the blocks: `torch.compiler.set_stance` would affect everything, and FlexAttention refuses to run uncompiled.
    """
    blocks: list[Any] = [module for module in cast(Llama, part).layers.modules() if isinstance(module, OptimizedModule)]
    compiled = [block.forward for block in blocks]
    try:
        for block in blocks:
            block.forward = block._orig_mod.__call__
        yield
    finally:
        for block, forward in zip(blocks, compiled, strict=True):
            block.forward = forward
