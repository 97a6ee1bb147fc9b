"""Computes with exported models by `transformers` alone: the program that `elsewhere.run_elsewhere` starts.

Each function takes a model directory and returns tensors, which are saved for the test to compare.
"""

import importlib.util
import sys

import torch
import transformers
from safetensors.torch import save_file
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, cache_utils

VERSION = sys.argv[1]
FP32 = {"trust_remote_code": True, "torch_dtype": torch.float32}


def seeded_tokens(*shape):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(1))


def generated(model, ids, attention_mask=None, **more):
    # Without a mask, generate would take token 0 for padding.
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    limits = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **(limits | more))


def padded_left(*rows):
    """Ids and mask of rows of several lengths."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.full((width - len(row),), 95), row]) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return ids, mask


def load(directory):
    """Logits, greedy answers, loss and a gradient; the model is saved again beside it."""
    model = AutoModelForCausalLM.from_pretrained(directory, **FP32).eval()
    tokens, result = seeded_tokens(2, 60), {}
    with torch.no_grad():
        for length in (40, 60):
            result[f"logits_{length}"] = model(tokens[:, :length]).logits
        result["cached"] = generated(model, tokens[:, :30])
        result["uncached"] = generated(model, tokens[:, :30], use_cache=False)
        rows = [tokens[0, :9], tokens[1, :30]]
        ids, mask = padded_left(*rows)
        result["batched"] = generated(model, ids, mask)[:, 30:]
        result["single"] = torch.stack([generated(model, row[None])[0, len(row) :] for row in rows])
        result["padded_logits"] = model(ids, attention_mask=mask).logits[0, -9:]
        result["short_logits"] = model(tokens[:1, :9]).logits[0]
    model.train()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    result |= {"loss": loss.detach(), "grad": model.model.layers[0].self_attn.q_proj.weight.grad}
    model.save_pretrained(f"{directory}-again-{VERSION}")
    return result


def native(directory):
    """Logits by a class of transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert type(model).__module__.startswith("transformers.")
    return {"logits": model(seeded_tokens(2, 40)).logits.detach()}


def answer(directory):
    """Called as by HELMET (model_utils.py, HFModel), and partly L-Eval and LOFT."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    assert tokenizer.pad_token is None
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.truncation_side = tokenizer.padding_side = "left"
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    how = {"config": config, "device_map": "auto", "trust_remote_code": True}
    try:
        AutoModelForCausalLM.from_pretrained(directory, attn_implementation="flash_attention_2", **how)
    except ImportError as error:  # of the package, which is not there; and not that the model is none for it
        missing = str(error)
    assert "installed" in missing, missing
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32, **how)
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    text = ["the river runs under seven stones", "a stone"]
    inputs = tokenizer([text[0]], return_tensors="pt", max_length=24, truncation=True, padding=True)
    limits = {"max_new_tokens": 12, "min_new_tokens": 0, "do_sample": False, "temperature": 0.0, "top_p": 1.0}
    limits |= {"eos_token_id": stops, "pad_token_id": tokenizer.pad_token_id}
    limits |= {"return_dict_in_generate": True, "output_scores": False}
    with (
        torch.no_grad()
    ):  # all but the last token read by the decoder without its head, then generate with what it kept
        read = model.model(input_ids=inputs.input_ids[..., :-1], attention_mask=inputs.attention_mask[..., :-1])
        outputs = model.generate(**inputs, past_key_values=read.past_key_values, **limits)
    both = tokenizer(text, return_tensors="pt", padding=True)
    bf16 = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.bfloat16, **how)
    return {
        "stops": torch.tensor(stops),
        "ids": inputs.input_ids,
        "prefilled": outputs["sequences"][:, inputs.input_ids.shape[1] :],
        "padded": model.generate(**both, **limits)["sequences"][:, both.input_ids.shape[1] :],
        "short": tokenizer(text[1], return_tensors="pt").input_ids,
        "logits": model(inputs.input_ids).logits.detach(),
        "bf16_logits": bf16(inputs.input_ids).logits.detach().float(),
        "bf16_answer": bf16.generate(**inputs, **limits)["sequences"],
    }


def train(directory):
    """Two steps of `Trainer` on rows that count for different numbers of tokens."""

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    model = AutoModelForCausalLM.from_pretrained(directory, **FP32)
    rows = seeded_tokens(8, 40)
    labels = rows.clone()
    labels[1::2, 10:30] = labels[:, 0] = -100  # 4.46 also counts the first label of a row, which no token predicts
    arguments = transformers.TrainingArguments(
        f"{directory}-run-{VERSION}", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    trainer = InOrder(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(f"{directory}-trained-{VERSION}")
    return {"rows": rows, "labels": labels}


def as_llama(directory):
    """The outputs of `transformers`' Llama and of our modelling file with the same weights."""
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 8}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(0)
    llama = LlamaForCausalLM._from_config(LlamaConfig(**shape), attn_implementation="eager").eval()
    kind = {"rotary": 0, "scopes": None, "scope_ranks": None, "alibi_slopes": None}
    inv_freq = [10_000.0 ** (-pair / 4) for pair in range(4)]
    config = type(AutoConfig.from_pretrained(directory, trust_remote_code=True))(
        **shape, rms_norm_eps=llama.config.rms_norm_eps, layer_kinds=[0] * 3, kinds=[kind], trained_length=64,
        rotaries=[{"inv_freq": inv_freq, "attention_factor": 1.0}],
        auto_map={"AutoModelForCausalLM": f"{directory}--modeling_farsight.FarsightForCausalLM"},
    )  # fmt: skip
    ours = AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager").eval()
    ours.load_state_dict(llama.state_dict())
    tokens, result = seeded_tokens(2, 20), {}
    ids, mask = padded_left(tokens[0, :7], tokens[1])
    everything = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        for name, model in (("ours", ours), ("llama", llama)):
            given = model(tokens, **everything)
            result[f"{name}_states"] = torch.stack(given.hidden_states)
            result[f"{name}_weights"] = torch.stack(given.attentions)
            inner = model.model(tokens, **everything)
            result[f"{name}_inner_states"], result[f"{name}_inner_weights"] = (
                inner.hidden_states[-1],
                inner.attentions[-1],
            )
            padded = model(ids, attention_mask=mask, **everything)
            result[f"{name}_padded_weights"] = torch.stack(padded.attentions)[:, 0, :, -7:, -7:]
            plain = model(tokens)
            assert plain.hidden_states is None
            assert plain.attentions is None
            steps = generated(model, tokens, return_dict_in_generate=True, **everything)
            result[f"{name}_step_weights"] = steps.attentions[-1][1]
            result[f"{name}_step_states"] = steps.hidden_states[-1][-1]
            given, again = model(tokens, return_dict=False, **everything), model(tokens, **everything)
            assert isinstance(given, tuple)
            assert len(given) == len(again.to_tuple())
            result[f"{name}_tuple"] = given[0]
        ours.config.output_hidden_states = True
        result["by_config"] = torch.stack(ours(tokens).hidden_states)
        ours.config.return_dict = False
        assert isinstance(ours(tokens), tuple)
    return result


def refusal(function, *arguments, **more):
    """The message of the ValueError that a call raises; "" if it raises none."""
    try:
        function(*arguments, **more)
    except ValueError as error:
        return str(error)
    return ""


def call(directory):
    """Every way to call the model, beside the plainest one."""
    model = AutoModelForCausalLM.from_pretrained(directory, **FP32).eval()
    tokens, result = seeded_tokens(2, 40), {}
    ids, mask = padded_left(tokens[0, :9], tokens[1, :30])
    with torch.no_grad():
        whole = model(tokens).logits
        result["whole"], result["embedded"] = whole, model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
        result["kept"] = model(tokens, logits_to_keep=3).logits
        result["kept_before_4_50"] = model(tokens, num_logits_to_keep=3).logits
        result["picked"] = model(tokens, logits_to_keep=torch.tensor([5, 11])).logits

        static = cache_utils.StaticCache(config=model.config, **static_options())
        parts = [model(part, past_key_values=static).logits for part in tokens.split([20, 7, 1, 1, 11], dim=1)]
        result["static_parts"] = torch.cat(parts, dim=1)
        dynamic = cache_utils.DynamicCache()
        parts = [model(part, past_key_values=dynamic).logits for part in tokens.split([20, 7, 1, 1, 11], dim=1)]
        result["dynamic_parts"] = torch.cat(parts, dim=1)

        result["greedy"] = generated(model, tokens[:, :20])
        result["greedy_static"] = generated(model, tokens[:, :20], cache_implementation="static")
        result["padded"] = generated(model, ids, mask)
        result["padded_static"] = generated(model, ids, mask, cache_implementation="static")
        result["beams"] = generated(model, tokens[:, :20], num_beams=3)
        result["beams_uncached"] = generated(model, tokens[:, :20], num_beams=3, use_cache=False)
        result["beams_static"] = generated(model, tokens[:, :20], num_beams=3, cache_implementation="static")
        # Few guesses are right, so that the cache is cut after almost every step.
        # An end token, without which 4.46 looks no prompts up, and no least length, with which 4.57 has no assistants.
        ends = {"eos_token_id": 95, "min_new_tokens": None}
        result["single"] = generated(model, tokens[:1, :20], **ends)
        result["looked_up"] = generated(model, tokens[:1, :20], prompt_lookup_num_tokens=4, **ends)
        draft = AutoModelForCausalLM.from_pretrained(directory, **FP32).eval()
        draft.model.layers[-1].mlp.down_proj.weight.mul_(0.5)
        result["assisted"] = generated(model, tokens[:1, :20], assistant_model=draft, **ends)
        embeds = model.get_input_embeddings()(tokens[:, :20])
        limits = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
        result["from_embeddings"] = model.generate(
            inputs_embeds=embeds, attention_mask=torch.ones(2, 20).long(), **limits
        )

        eager = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **FP32).eval()
        given = eager(tokens, output_attentions=True)
        result |= {"eager": given.logits, "weights": torch.stack(given.attentions)}

        message = refusal(model, tokens, output_attentions=True)
        assert 'load the model with attn_implementation="eager"' in message, message
        for cache in caches_that_drop_keys(model.config):
            message = refusal(model, tokens[:, :2], past_key_values=cache)
            assert message.startswith(f"{type(cache).__name__} does not keep every token's keys"), message
        message = refusal(model, tokens, attention_mask=torch.ones(2, 1, 40, 40))
        assert "attention_mask has shape [2, 1, 40, 40]; pass [batch, 40]" in message, message
        message = refusal(model, tokens[:, :2], attention_mask=torch.ones(2, 2), past_key_values=dynamic)
        assert "attention_mask has shape [2, 2]; pass [batch, 42]" in message, message
        assert "logits_to_keep has 2 dimensions" in refusal(model, tokens, logits_to_keep=torch.zeros(2, 2).long())

    model.train()
    for name, options in (("plain", None), ("reentrant", {"use_reentrant": True}), ("not", {"use_reentrant": False})):
        if options is not None:
            model.gradient_checkpointing_enable(options)
            message = refusal(model, tokens, past_key_values=cache_utils.DynamicCache())
            assert "DynamicCache: a cache would be filled twice by gradient checkpointing" in message, message
        model.zero_grad()
        counter = Calls(model.model.layers[1].self_attn)
        model(tokens, labels=tokens).loss.backward()
        assert counter.stop() == (1 if options is None else 2)
        result |= {f"{name}_grad.{key}": value.grad.clone() for key, value in model.named_parameters()}
    return result


class Calls:
    """Counts the calls of a module."""

    def __init__(self, module):
        self.number, self.hook = 0, module.register_forward_hook(self.count)

    def count(self, *_):
        self.number += 1

    def stop(self):
        self.hook.remove()
        return self.number


def static_options():
    """Arguments of static caches; the later versions ignore all but the first."""
    return {"max_cache_len": 64, "max_batch_size": 2, "device": "cpu", "dtype": torch.float32}


def caches_that_drop_keys(config):
    keys = torch.zeros(2, 4, 3, 8)
    yield ((keys, keys),) * config.num_hidden_layers  # the caches of earlier versions
    yield cache_utils.EncoderDecoderCache(cache_utils.DynamicCache(), cache_utils.DynamicCache())
    windowed = LlamaConfig(
        num_hidden_layers=4, hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=8
    )
    windowed.sliding_window = 8
    if VERSION == "oldest":
        yield cache_utils.SinkCache(window_length=8, num_sink_tokens=2)
        yield cache_utils.SlidingWindowCache(config=windowed, **static_options())
        yield cache_utils.HybridCache(config=windowed, **static_options())
    else:
        yield cache_utils.StaticCache(config=windowed, **static_options())
        yield cache_utils.DynamicCache(config=windowed)


if __name__ == "__main__":
    for package in ("model", "kernels", "configs", "checkpoints", "farsight"):
        assert importlib.util.find_spec(package) is None, package
    for task in sys.argv[2:]:
        function, directory, out = task.split(":")
        print(function, directory, transformers.__version__)
        tensors = globals()[function](directory)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)
