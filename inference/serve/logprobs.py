"""Log-probabilities of tokens, as the model gives them before temperature and nucleus.

Shape suffixes: B rows, L tokens, D model, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farsight.inference.decoder import Rows

HEAD_TOKENS = 512
"""Positions whose logits are held in memory at once."""


@dataclass(frozen=True)
class TokenLog:
    """A token and its log-probability, beside those of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token and log-probability, from the likeliest on."""


@torch.no_grad()
def token_logs(logp_LV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLog]:
    """The logs of chosen tokens.

    Args:
        logp_LV: log-probabilities in each token's place.
        tokens: those chosen, L of them.
        top: how many of the likeliest to log.
    """
    own_L = logp_LV.gather(-1, torch.tensor(tokens, device=logp_LV.device)[:, None])[:, 0].tolist()
    best_LK, best_tokens_LK = logp_LV.topk(min(top, logp_LV.shape[-1]))
    tops = zip(best_tokens_LK.tolist(), best_LK.tolist(), strict=True)
    return [
        TokenLog(token, own, tuple(zip(*best, strict=True)))
        for token, own, best in zip(tokens, own_L, tops, strict=True)
    ]


def prompt_logs(
    rows: Rows, number: int, prompt: Sequence[int], h_BLD: Tensor, vocabulary: int, top: int
) -> list[TokenLog]:
    """The logs of the tokens of a prompt that a chunk of its batch predicts; nothing predicts the first one.

    Args:
        rows: the batch; it has read the chunk.
        number: the row's.
        h_BLD: hidden states of the chunk.
        vocabulary: tokens that the tokenizer has; the model's may be rounded up.
    """
    start, read, L = rows.batch.starts[number], rows.tokens, h_BLD.shape[1]
    first, stop = max(start, read - L), min(read, rows.batch.prompt - 1)
    logs: list[TokenLog] = []
    for begin in range(first, stop, HEAD_TOKENS):
        end = min(begin + HEAD_TOKENS, stop)
        h_LD = h_BLD[number, begin - (read - L) : end - (read - L)]
        logp_LV = rows.decoder.logits(h_LD[None])[0].log_softmax(-1)[:, :vocabulary]
        logs += token_logs(logp_LV, prompt[begin + 1 - start : end + 1 - start], top)
    return logs
