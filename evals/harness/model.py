"""Adapts our models to lm-evaluation-harness. Needs `lm_eval`, so import it only where it is used.

Text is encoded as `transformers` encodes it for lm-eval's `HFLM`: bos comes first if the tokenizer puts it there, and the text of a
special token becomes that token only under a chat template.

Shape suffixes: B rows, L tokens, D model, V vocabulary.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from farsight.data.instructions.chat import ChatTemplate
from farsight.data.instructions.conversations import UnusableRow
from farsight.errors import ConfigError
from farsight.inference.generate.completions import generate
from farsight.inference.loading import LoadedModel
from farsight.inference.sampling import Sampling
from farsight.progress import progress

logger = logging.getLogger("farsight")

HEAD_TOKENS = 512
"""Positions whose logits are held in memory at once."""
SEED = 1234
"""Seed of sampled answers; lm-eval's own default."""
_GENERATION_SETTINGS = {"do_sample", "temperature", "top_p", "until", "max_gen_toks"}
_GREEDY_SETTINGS = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
}  # fmt: skip
"""Settings of a generation_config.json that change even greedy answers of `transformers`, with the values that do not."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""The request's texts, and the tokens of its context and its continuation."""


@dataclass(frozen=True)
class Reading:
    """Settings for reading a task's text."""

    max_length: int
    """Most tokens in a text, generated ones included."""
    truncate: Literal["left", "middle"] = "left"
    """Where too long a context is cut: on the left as in lm-eval, or in the middle as in LongBench, which keeps both ends."""
    rows_at_once: int = 8
    bos: bool | None = None
    """Start with bos; None does what the tokenizer does under `transformers`."""
    chat: bool = False
    """Format prompts with the tokenizer's chat template."""


class HarnessModel(TemplateLM):
    """Scores and continues text for lm-eval."""

    def __init__(self, model: LoadedModel, reading: Reading) -> None:
        super().__init__()
        self.model, self.reading = model, reading
        self._cut_contexts: set[int] = set()
        tokenizer = model.tokenizer
        self.bos = tokenizer.begins_with_bos if reading.bos is None else reading.bos
        if self.bos and tokenizer.bos_id is None:
            raise ConfigError(f"--bos yes: the tokenizer of {model.path} has no bos token.")
        self.template = None
        if reading.chat:
            if tokenizer.chat_template is None:
                raise ConfigError(f"--chat: the tokenizer of {model.path} has no chat template; leave --chat out.")
            self.template = ChatTemplate(tokenizer.chat_template, "the tokenizer's chat template", tokenizer)
        self.end_tokens = model.end_tokens if self.template is None else model.end_tokens_of_chat(self.template)
        self._leaves_out_system = False
        path, settings = model.generation_settings
        if changed := [f"{k} = {settings[k]}" for k, v in _GREEDY_SETTINGS.items() if settings.get(k) not in (None, v)]:
            logger.warning(f"{path}: {', '.join(changed)} changes answers of transformers, and is ignored here.")

    @property
    def truncated(self) -> int:
        """Number of texts cut to `max_length` so far; a text counts once, however many answers to it were scored."""
        return len(self._cut_contexts)

    @property
    def eot_token_id(self) -> int | None:
        return self.model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token placed before a text without context."""
        tokenizer = self.model.tokenizer
        found = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if found is None:
            raise ConfigError(
                f"the tokenizer of {self.model.path} has neither bos nor eos to put before an empty context."
            )
        return found

    @property
    def max_length(self) -> int:
        return self.reading.max_length

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if self.template is None else self.template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as text; without `add_generation_prompt`, the last one is an answer to be continued.

        Raises:
            ConfigError: messages that the template refuses, even without those of the system.
        """
        assert self.template is not None
        render = self.template.prompt if add_generation_prompt else self.template.unfinished
        try:
            return render(chat_history)
        except UnusableRow as error:
            asked = [message for message in chat_history if message["role"] != "system"]
            if len(asked) < len(chat_history):  # some templates know no system, and then `HFLM` leaves it out
                if not self._leaves_out_system:
                    logger.warning(f"{error}: messages of the system are left out.")
                self._leaves_out_system = True
                return self.apply_chat_template(asked, add_generation_prompt)
            raise ConfigError(f"--chat: the chat template does not take a task's messages: {error}.") from error

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokenizer = self.model.tokenizer
        if self.template is None:
            ids = tokenizer.encode(string)
        else:
            ids = tokenizer.encode_rendered([string])[0].ids.tolist()
        bos = self.bos if add_special_tokens is None else add_special_tokens
        # A template may already have written bos.
        if bos and tokenizer.bos_id is not None and not (self.template and ids[:1] == [tokenizer.bos_id]):
            ids = [tokenizer.bos_id, *ids]
        return ids

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each request, the sum of its continuation's log-probabilities, and whether greedy decoding would produce it."""
        # One-token answers to the same question need the same forward pass, so each such text is read once.
        asked: dict[tuple[int, ...], list[int]] = {}
        for number, (_asked, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation has {len(continuation):,} tokens, --max-length is {self.max_length:,}: raise it."
                )
            context = self._cut(context, self.max_length + 1 - len(continuation))
            asked.setdefault((*context, *continuation[:-1]), []).append(number)
        texts = list(asked)
        answers: dict[int, tuple[float, bool]] = {}
        with progress(total=len(requests), desc="score", unit="request", disable=disable_tqdm) as bar:
            for rows in self._batches([len(text) for text in texts]):
                longest = max(len(requests[number][2]) for row in rows for number in asked[texts[row]])
                h_BLD = self._last_hidden_states([texts[row] for row in rows], longest)
                for row, h_LD in zip(rows, h_BLD, strict=True):
                    for number in asked[texts[row]]:
                        key, _context, continuation = requests[number]
                        answers[number] = self._score(h_LD[len(h_LD) - len(continuation) :], continuation)
                        if key is not None:
                            self.cache_hook.add_partial("loglikelihood", key, answers[number])
                        bar.update()
        return [answers[number] for number in range(len(requests))]

    def _last_hidden_states(self, texts: Sequence[Sequence[int]], last: int) -> Tensor:
        """Hidden states of the last tokens of each text, left-padded: [B, at most `last`, D]."""
        rows = self.model.decoder.start([len(text) for text in texts])
        longest = max(map(len, texts))
        tokens_BL = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens_BL[row, longest - len(text) :] = torch.tensor(text)
        kept: Tensor | None = None
        for h_BLD in rows.chunks(tokens_BL.to(rows.batch.device)):
            kept = h_BLD[:, -last:] if kept is None else torch.cat((kept, h_BLD), dim=1)[:, -last:]
        assert kept is not None
        return kept

    def _score(self, h_LD: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
        total, greedy = 0.0, True
        targets_L = torch.tensor(continuation, device=h_LD.device)
        for h, targets in zip(h_LD.split(HEAD_TOKENS), targets_L.split(HEAD_TOKENS), strict=True):
            logits_LV = self.model.decoder.logits(h[None])[0]
            total += float(logits_LV.log_softmax(-1).gather(-1, targets[:, None]).double().sum())
            greedy = greedy and bool((logits_LV.argmax(-1) == targets).all())
        return total, greedy

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, from windows of at most `max_length` tokens that predict every token once."""
        windows: list[Request] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's continuation of each context, up to a stop string; the text that `HFLM` decodes and cuts."""
        tokenizer = self.model.tokenizer
        eos = tokenizer.special_token(tokenizer.eos_id)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        with progress(total=0, desc="generate", unit="token", unit_scale=True, disable=disable_tqdm) as bar:
            for numbers in alike.values():
                settings = self._settings(requests[numbers[0]].args[1])
                until = handle_stop_sequences(settings["until"], eos)
                # Some tasks stop at the text of a special token, which decoded text does not have.
                ends = self.end_tokens | {tokenizer.special_tokens.get(text) for text in until}
                new_tokens = settings["max_gen_toks"]
                sampled = settings["do_sample"] and settings["temperature"] > 0
                prompts = [self._prompt(requests[number].args[0], new_tokens) for number in numbers]
                bar.total += sum(map(len, prompts))
                for rows in self._batches([len(prompt) + new_tokens for prompt in prompts]):
                    sampling = Sampling(
                        settings["temperature"] if sampled else 0.0, settings.get("top_p", 1.0), SEED + len(texts)
                    )
                    completions = generate(
                        self.model.decoder,
                        tokenizer,
                        [prompts[row] for row in rows],
                        new_tokens,
                        sampling,
                        until,
                        self.reading.rows_at_once,
                        bar=bar,
                        end_tokens=ends,
                        continued=False,
                    )
                    for row, completion in zip(rows, completions, strict=True):
                        # An end token that is not special, such as a line end, is a part of the answer there.
                        text = postprocess_generated_text(tokenizer.decode(completion.tokens), until, None)
                        texts[numbers[row]] = text
                        self.cache_hook.add_partial("generate_until", requests[numbers[row]].args, text)
        return [texts[number] for number in range(len(requests))]

    def _settings(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A task's `generation_kwargs`, completed with defaults."""
        settings = dict(normalize_gen_kwargs(asked))
        settings.setdefault("temperature", 0.0)
        if ignored := sorted(set(settings) - _GENERATION_SETTINGS):
            logger.warning(f"generation_kwargs {', '.join(ignored)}: there is no such setting here, they are ignored.")
        if settings["max_gen_toks"] >= self.max_length:
            raise ConfigError(
                f"a task writes up to {settings['max_gen_toks']:,} tokens, which leaves nothing of --max-length "
                f"{self.max_length:,} to its prompt: set a larger one."
            )
        return settings

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        return self._cut(self.tok_encode(context) or [self.prefix_token_id], self.max_length - new_tokens)

    def _cut(self, context: list[int], room: int) -> list[int]:
        """Cuts a context to at most `room` tokens."""
        if len(context) <= room:
            return context
        self._cut_contexts.add(hash(tuple(context)))
        begin = room // 2 if self.reading.truncate == "middle" else 0
        return context[:begin] + context[len(context) - (room - begin) :]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the rows to read together, longest first, so that running out of memory happens at the start."""
        distinct = sorted(set(lengths))
        for group in self.model.decoder.group_by_positions(distinct, distinct):
            members = set(group)
            rows = [row for row, length in enumerate(lengths) if length in members]
            rows.sort(key=lambda row: -lengths[row])
            for i in range(0, len(rows), self.reading.rows_at_once):
                yield rows[i : i + self.reading.rows_at_once]
