"""One decoding step, from each row's token to its next one; on CUDA captured in a graph, and replayed for every token.

A step depends on tensors alone: the token's position and the caches are read and advanced on the device. So launching a graph
takes the place of launching a thousand kernels one by one, which takes the host longer than the GPU needs to run them.

Shape suffixes: B rows, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from farsight.inference.decoder import Rows
from farsight.inference.finite import check_finite, refuse_logits
from farsight.inference.sampling import Sampling, choose

WARM_UP = 3
"""Steps that run eagerly before the capture, which allows no first uses: of a kernel to compile, or a library to set up."""


class CudaGraph:
    """Kernels captured on a stream of their own, as PyTorch's documentation says."""

    def __init__(self) -> None:
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Runs eagerly on the stream of the capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, run: Callable[[], None]) -> None:
        """Records what `run` launches, without launching it. Other threads may use the device meanwhile."""
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        self.graph.replay()


class Step:
    """Reads a token of each row and chooses the next.

    Where it can be captured in a CUDA graph, the first steps are the warm-up, and decode their tokens like any other. All
    tensors then stay where they are: a call overwrites those of the call before.

    Args:
        rows: their prompts have been read.
        logits_BV: those of the prompts' last tokens, fp32.
        vocabulary: tokens to choose from, the first of the model's; it may have more entries, to round their number up.

    Attributes:
        tokens_B1: the tokens that the next call reads, int64. A call sets them to the likeliest; others are copied in.
        logits_BV: those of the tokens that were read last, fp32.
        likeliest_B: the likeliest next tokens, int64; -1 where logits are not finite.
    """

    def __init__(self, rows: Rows, logits_BV: Tensor, vocabulary: int) -> None:
        self.rows, self.vocabulary, self.capturable = rows, vocabulary, rows.capturable
        self.tokens_B1 = torch.empty(len(logits_BV), 1, dtype=torch.int64, device=logits_BV.device)
        self._graph = CudaGraph() if self.capturable else None
        self._calls = 0
        self._take(logits_BV)

    @torch.no_grad()
    def __call__(self) -> None:
        self._calls += 1
        if self._graph is None:
            self._run()
        elif self._calls <= WARM_UP:
            self._graph.warm_up(self._run)
        else:
            self.rows.place()
            if self._calls == WARM_UP + 1:
                self._graph.capture(self._run)  # counts a token on the host, as a run does
            else:
                self.rows.count_replayed()
            self._graph.replay()

    def _run(self) -> None:
        h_BLD = self.rows.read(self.tokens_B1)
        self._take(self.rows.decoder.model.head(h_BLD)[:, -1].float())

    def _take(self, logits_BV: Tensor) -> None:
        self.logits_BV = logits_BV
        likeliest_B = logits_BV[:, : self.vocabulary].argmax(-1)
        self.tokens_B1.copy_(likeliest_B[:, None])
        least_B, most_B = logits_BV.aminmax(dim=-1)
        finite_B = least_B * 0 == most_B * 0  # 0 times infinity is not a number, and that equals nothing
        self.likeliest_B = torch.where(finite_B, likeliest_B, -1)


def written(
    step: Step,
    count: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    look: Callable[[Tensor], object] | None = None,
) -> Iterator[list[int]]:
    """Each row's next token, `count` times.

    Greedy decoding on CUDA launches a step before it waits for the token of the one before, so that the GPU never waits for
    the host. Whoever stops early has had one step computed too many.

    Args:
        look: called with the logits that each token is chosen from, fp32 [B, V], before the next step overwrites them.

    Raises:
        ConfigError: logits that are not finite, as from a damaged model.
    """
    decoder = step.rows.decoder
    for left in reversed(range(count)):
        ahead = False
        if look is not None:
            look(step.logits_BV)
        if sampling.temperature == 0:
            likeliest = _fetch(step.likeliest_B)
            if ahead := step.capturable and left > 0:
                step()
            tokens = likeliest()
            if min(tokens) < 0:
                refuse_logits(decoder.model, decoder.name)
        else:
            logits_BV = step.logits_BV.cpu()
            check_finite(logits_BV, decoder.model, decoder.name)
            drawn_B = choose(logits_BV[:, : step.vocabulary], sampling, generators)
            step.tokens_B1.copy_(drawn_B[:, None])
            tokens = drawn_B.tolist()
        yield tokens
        if left and not ahead:
            step()


def _fetch(x: Tensor) -> Callable[[], list[int]]:
    """Starts copying a tensor to the host; the function that it returns waits for the copy."""
    host = x.to("cpu", non_blocking=True, copy=True)  # into pinned memory
    copied = torch.cuda.Event() if x.is_cuda else None
    if copied is not None:
        copied.record()

    def wait() -> list[int]:
        if copied is not None:
            copied.synchronize()
        return host.tolist()

    return wait
