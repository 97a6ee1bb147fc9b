"""Models, adapters and checkpoints behind the interface of `transformers`, with context extensions.

    from farsight.inference.hf_model import load

    model = load("MODEL_DIR", extend="ripra")  # in place of AutoModelForCausalLM.from_pretrained("MODEL_DIR")
    tokens = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64)

So the scripts of benchmarks that load a model with `transformers` drive Farsight's decoder, its cache and every method of
--extend. `generate` is that of `transformers`, greedy or sampling, with its logits processors, stopping criteria and streamers.
Needs `transformers`, so import it only where it is used.

Shape suffixes: B rows, L tokens, D model, V vocabulary.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.model_dir.api import is_adapter
from farsight.cli import device as known_device
from farsight.errors import UserError
from farsight.inference import loading
from farsight.inference.decoder import Rows
from farsight.inference.finite import check_finite
from farsight.inference.generate.completions import read_prompts
from farsight.inference.loading import LoadedModel
from farsight.inference.model_options import CHUNK, DTYPES
from farsight.inference.step import Step
from farsight.json_files import read_object
from farsight.remote import local

NEW_TOKENS = 20
"""Tokens that `generate` writes where nothing says how many, as in `transformers`."""


def load(
    path: str | Path,
    extend: str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    scope_max: str | None = None,
    chunk: int = CHUNK,
    trust_remote_code: bool = False,
) -> "DecoderForCausalLM":
    """Loads a model directory, adapter or step-N folder of a checkpoint.

    Args:
        extend: a method as `--extend` takes it, such as "ripra" or "yarn:4".
        device: default: the accelerator if there is one, else the CPU.
        dtype: of weights and cache; "auto": as the model is stored; default: bfloat16, and float32 on a CPU.
        scope_max: "trained" or "length", as `--scope-max` takes it.
        chunk: tokens of a prompt to read at once.
        trust_remote_code: run the Python code in the directory of a model that only transformers builds.

    Raises:
        UserError: no model there, a setting that is none of those above, a device that is not here, or an extension that does
            not fit the model.
    """
    path = local(path)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name == "auto":
        name = _stored_dtype(path)
    if name not in (None, *DTYPES):
        raise UserError(f"dtype = {name}: write one of {', '.join(DTYPES)}, or auto.")
    if scope_max not in (None, "trained", "length"):
        raise UserError(f"scope_max = {scope_max!r}: write 'trained' or 'length', or leave it out.")
    try:
        device = None if device is None else known_device(str(device))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"device = {error}.") from None
    options = argparse.Namespace(
        device=device,
        dtype=name,
        extend=extend,
        scope_max=scope_max,
        chunk=chunk,
        trust_remote_code=trust_remote_code,
    )
    return DecoderForCausalLM(loading.load(path, options))


def _stored_dtype(path: Path) -> str | None:
    """The dtype that a model directory's config.json names, an adapter's base's; None where there is none, as in a checkpoint."""
    if is_adapter(path):
        path = local(read_adapter(path).base.path)
    file = path / "config.json"
    values = read_object(file) if file.is_file() else {}
    for part in (values, values.get("text_config") or {}):
        if found := part.get("dtype") or part.get("torch_dtype"):
            return str(found)
    return None


class _Part(NamedTuple):
    """Rows of a batch that get the same positions."""

    numbers: list[int]
    step: Step


class _Reading:
    """The tokens that one call of `generate` has read so far.

    Args:
        new_tokens: most tokens that it may write.
    """

    def __init__(self, new_tokens: int) -> None:
        self.new_tokens, self.columns = new_tokens, 0
        self.parts: list[_Part] = []


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):
    """A model in evaluation mode that reads and generates with `inference.decoder.Decoder`. It computes no gradients.

    Args:
        loaded: from `inference.loading.load`.

    Attributes:
        loaded: the same, with the tokenizer and the decoder.
    """

    config_class = PretrainedConfig
    base_model_prefix = "inner"
    # The decoder has kernels of its own, whatever attention is requested.
    _supports_sdpa = True

    def __init__(self, loaded: LoadedModel) -> None:
        a, tokenizer = loaded.config.architecture, loaded.tokenizer
        config = PretrainedConfig.from_dict(
            {
                "vocab_size": a.vocab_size,
                "hidden_size": a.dim,
                "num_hidden_layers": a.n_layers,
                "num_attention_heads": a.n_heads,
                "num_key_value_heads": a.n_kv_heads,
                "head_dim": a.head_dim,
                "max_position_embeddings": loaded.trained_length,
                "bos_token_id": tokenizer.bos_id,
                "eos_token_id": tokenizer.eos_id,
                "architectures": [type(self).__name__],
            }
        )
        config.name_or_path = str(loaded.path)
        super().__init__(config)
        self.loaded, self.inner = loaded, loaded.decoder.module
        self.generation_config = _generation_config(loaded)
        self._reading: _Reading | None = None
        self.eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DecoderForCausalLM":
        """Moves or casts the weights; frequencies, scopes and slopes keep their dtypes and values."""
        before = dict(self.inner.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.inner.named_buffers():
            buffer.data = before[name].to(buffer.device)
        return self

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refused: `farsight convert` and `farsight merge` write directories that `transformers` reads."""
        raise UserError(
            "save_pretrained: this model only reads and writes text; use `farsight convert to-hf` or `farsight merge`."
        )

    # ── Generating ────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def generate(  # type: ignore[override]  # the other arguments go to `transformers` as they are
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """`GenerationMixin.generate`, greedy or sampling; rows are padded on the left.

        Raises:
            UserError: beam search or another way to decode that would go back in the cache, another cache, or right padding.
        """
        for settings in (kwargs, vars(generation_config or object)):
            if (cache := settings.get("cache_implementation")) not in (None, "dynamic"):
                raise UserError(
                    f"generate: cache_implementation = {cache!r} is not supported: the decoder keeps a cache of its own; leave it out."
                )
        asked = copy.deepcopy(generation_config or self.generation_config)
        asked.update(**{name: value for name, value in kwargs.items() if hasattr(asked, name)})
        mode = str(getattr(asked.get_generation_mode(kwargs.get("assistant_model")), "value", "")).lower()
        if mode not in ("greedy_search", "sample"):
            raise UserError(
                f"generate: {mode.replace('_', ' ')} is not supported; set num_beams=1 and leave its options out."
            )
        given = inputs if inputs is not None else kwargs.get("input_ids")
        columns = 1 if given is None else given.shape[1]
        new_tokens = asked.max_new_tokens
        if new_tokens is None:
            # transformers 5 writes 20 tokens by default; version 4 keeps a default of 20 in max_length itself.
            given_here = "max_length" in kwargs or asked.max_length not in (None, NEW_TOKENS)
            new_tokens = asked.max_length - columns if given_here else NEW_TOKENS
        if new_tokens < 1:
            raise UserError(
                f"generate: max_length = {asked.max_length} leaves nothing after {columns} tokens; set max_new_tokens."
            )
        kwargs = {**kwargs, "max_new_tokens": new_tokens, "use_cache": False}
        kwargs.pop("max_length", None)
        if generation_config is not None:
            generation_config = copy.deepcopy(generation_config)
            generation_config.max_length = None
        self._reading = _Reading(new_tokens)
        try:
            return super().generate(  # type: ignore[misc]  # annotated for a protocol of every model
                inputs, generation_config=generation_config, **kwargs
            )
        finally:
            self._reading = None

    def prepare_inputs_for_generation(  # type: ignore[override]  # takes what the decoder reads
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """The arguments of `forward`: all tokens so far, of which it reads the new ones."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "reading": self._reading}

    def _start(self, reading: _Reading, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Reads the prompts; returns the logits of the first new token, fp32 [B, V]."""
        if not bool(mask_BL[:, -1].all()):
            raise UserError("generate: a row is padded on the right; set padding_side = 'left' in the tokenizer.")
        out_BV = torch.empty(len(tokens_BL), self.config.vocab_size, device=self.device)
        for numbers, rows, texts in self._groups(tokens_BL, mask_BL, reading.new_tokens):
            out_BV[numbers] = logits_BV = read_prompts(rows, texts)
            reading.parts.append(_Part(numbers, Step(rows, logits_BV, self.loaded.tokenizer.vocab_size)))
        return out_BV

    def _continue(self, reading: _Reading, tokens_B1: Tensor) -> Tensor:
        """Reads a token of each row; returns the logits of the next, fp32 [B, V]."""
        out_BV = torch.empty(len(tokens_B1), self.config.vocab_size, device=self.device)
        for numbers, step in reading.parts:
            step.tokens_B1.copy_(tokens_B1[numbers])
            step()
            out_BV[numbers] = step.logits_BV
        check_finite(out_BV, self.loaded.decoder.model, self.loaded.decoder.name)
        return out_BV

    # ── Reading ───────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        reading: _Reading | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Logits of whole sequences, and their loss.

        Args:
            input_ids: int64 [B, L].
            attention_mask: [B, L], 0 for padding on either side; None means no padding.
            labels: int64 [B, L], each token itself; -100 where nothing is to be predicted.
            logits_to_keep: the last positions to give logits for, or their indices; 0 gives all.
            return_dict: False gives a tuple.
            reading: set by `generate`, which gets logits of the last position alone.

        Returns:
            Logits, fp32 [B, L or fewer, V], those at padding arbitrary; with labels the mean loss, a scalar.

        Raises:
            UserError: arguments that the decoder cannot follow, such as a cache or `output_attentions`.
        """
        for name, value in {**others, "use_cache": use_cache and reading is None}.items():
            if value is not None and value is not False:
                raise UserError(
                    f"{name} is not supported: pass input_ids, attention_mask and labels; the decoder keeps a cache of its own."
                )
        if input_ids is None:
            raise UserError("input_ids is missing: pass the tokens, int64 [rows, length].")
        if reading is None or not reading.columns:  # later ones are the model's own
            self._check_tokens(input_ids)
        tokens_BL = input_ids.to(self.device)
        mask_BL = torch.ones_like(tokens_BL) if attention_mask is None else attention_mask.to(self.device)
        loss = None
        if reading is not None:
            tokens_BL, first = tokens_BL[:, reading.columns :], not reading.columns
            reading.columns += tokens_BL.shape[1]
            logits_BV = self._start(reading, tokens_BL, mask_BL) if first else self._continue(reading, tokens_BL)
            # A model's vocabulary may be rounded up; the extra entries have no text.
            logits_BV[:, self.loaded.tokenizer.vocab_size :] = -torch.inf
            logits_BLV = logits_BV[:, None]
        else:
            h_BLD = self._hidden_states(tokens_BL, mask_BL)
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits_BLV = self.loaded.decoder.logits(h_BLD if labels is not None else h_BLD[:, keep])
            if labels is not None:
                # Nothing predicts a row's first token: before it is padding, if anything.
                seen_BL = mask_BL[:, :-1].bool()
                targets_BL = labels[:, 1:].to(self.device).masked_fill(~seen_BL, -100)
                loss = F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), targets_BL.flatten())
                logits_BLV = logits_BLV[:, keep]
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BLV)
        return output.to_tuple() if return_dict is False else output

    def _check_tokens(self, tokens_BL: Tensor) -> None:
        """Raises UserError for ids that the model has no embedding for."""
        most = self.config.vocab_size - 1
        outside = tokens_BL[(tokens_BL < 0) | (tokens_BL > most)]
        if len(outside):
            raise UserError(
                f"input_ids has the id {int(outside[0])}; the model has the tokens 0 to {most:,}. Is this its tokenizer?"
            )

    def _hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Hidden states in the places of their tokens, [B, L, D]; zeros at padding."""
        out_BLD: Tensor | None = None
        for numbers, rows, texts in self._groups(tokens_BL, mask_BL, 0):
            parts: list[Tensor] = []
            read_prompts(rows, texts, parts.append)
            h_BLD = torch.cat(parts, dim=1)
            if out_BLD is None:
                out_BLD = h_BLD.new_zeros(*tokens_BL.shape, h_BLD.shape[-1])
            for number, text, h_LD in zip(numbers, texts, h_BLD, strict=True):
                out_BLD[number, mask_BL[number].bool()] = h_LD[len(h_LD) - len(text) :]
        assert out_BLD is not None
        return out_BLD

    def _groups(
        self, tokens_BL: Tensor, mask_BL: Tensor, new_tokens: int
    ) -> Iterator[tuple[list[int], Rows, list[Tensor]]]:
        """The rows that get the same positions: their numbers, empty caches, and tokens without padding."""
        texts = []
        for row, (tokens_L, mask_L) in enumerate(zip(tokens_BL, mask_BL, strict=True)):
            places = mask_L.nonzero()[:, 0].tolist()
            if not places or places[-1] - places[0] + 1 != len(places):
                raise UserError(
                    f"attention_mask: row {row} must be one sequence of tokens, with padding before or after it."
                )
            texts.append(tokens_L[places[0] : places[-1] + 1])
        reach = [len(text) + new_tokens for text in texts]
        for numbers in self.loaded.decoder.group_by_positions(range(len(texts)), reach):
            own = [texts[number] for number in numbers]
            yield numbers, self.loaded.decoder.start([len(text) for text in own], new_tokens), own


def _generation_config(loaded: LoadedModel) -> GenerationConfig:
    """The settings of a generation_config.json, ending at every end token of the model."""
    path, settings = loaded.generation_settings
    if path is None or path.name != "generation_config.json":
        settings = {}
    settings = {
        name: value for name, value in settings.items() if name != "cache_implementation"
    }  # the decoder has its own
    ends = sorted(token for token in loaded.end_tokens if token is not None)
    defaults = {"bos_token_id": loaded.tokenizer.bos_id, "pad_token_id": loaded.tokenizer.eos_id}
    return GenerationConfig.from_dict({**defaults, **settings, "eos_token_id": ends or None})
