"""Exported models against ours, in a process that cannot import our packages.

Mechanisms that `transformers` lacks are exported in `modeling_farsight.py`. That process computes everything with
`transformers`' own loading and `generate`, and the results are compared with our model's logits here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import (
    Alibi,
    Architecture,
    DynamicNtkRope,
    Lasp,
    LayerRule,
    NoRotary,
    Position,
    Scope,
    SlidingWindow,
    Tokenizer,
    YarnRope,
)
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.model.build import ModelConfig, build_model, set_length

SHAPE = {"vocab_size": 96, "dim": 64, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 96}
TRAINED = 48
MIXED = Position(
    heads=Scope(),
    rules=(
        LayerRule(layers="1", rotary=NoRotary(), bias=Alibi()),
        LayerRule(layers="2", heads=SlidingWindow(window=5)),
        LayerRule(layers="3", rotary=DynamicNtkRope(factor=2.0, original_length=64)),
    ),
)
POSITIONS = {
    "scope_sorted": Position(heads=Scope(layout="sorted"), rotary=NoRotary()),
    "scope_interleaved": Position(heads=Scope(layout="interleaved"), rotary=NoRotary()),
    "scope_group_balanced": Position(heads=Scope(layout="group_balanced"), rotary=NoRotary()),
    "scope_lasp": Position(heads=Scope(), lasp=Lasp(anchor_layers=2)),
    "lasp_yarn": Position(rotary=YarnRope(factor=4.0, original_length=16), lasp=Lasp(anchor_layers=2)),
    "alibi": Position(rotary=NoRotary(), bias=Alibi()),
    "nope": Position(rotary=NoRotary()),
    "sinusoidal": Position(rotary=NoRotary(), embedding="sinusoidal"),
    "sliding_windows": Position(heads=SlidingWindow(window=7), rules=(LayerRule("2", heads=SlidingWindow(window=3)),)),
    "mixed": MIXED,
    "growing_scopes": Position(heads=Scope(scope_max="length"), rotary=NoRotary()),
}

LOADER = """
import importlib.util, sys, torch
for name in ("model", "kernels", "configs", "checkpoints", "farsight"):
    assert importlib.util.find_spec(name) is None, name
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
directory, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
tokens = torch.randint(96, (2, 60), generator=torch.Generator().manual_seed(1))
result = {}
with torch.no_grad():
    for length in (40, 60):
        result[f"logits_{length}"] = model(tokens[:, :length]).logits.contiguous()
    def generate(ids, attention_mask=None, **more):
        # Without a mask, generate would take token 0 for padding.
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        limits = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=0)
        return model.generate(ids, attention_mask=mask, **limits, **more)
    result["cached"] = generate(tokens[:, :30])
    result["uncached"] = generate(tokens[:, :30], use_cache=False)
    # Rows of 9 and 30 tokens, padded on the left, and each by itself.
    rows = [tokens[0, :9], tokens[1, :30]]
    ids = torch.stack([torch.cat([torch.full((30 - len(row),), 95), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(30 - len(row)), torch.ones(len(row))]) for row in rows]).long()
    batched = generate(ids, attention_mask=mask)
    result["batched"] = batched[:, 30:].contiguous()
    result["single"] = torch.stack([generate(row[None])[0, len(row):] for row in rows])
    padded = model(ids, attention_mask=mask).logits
    result["padded_logits"] = padded[0, -9:].contiguous()
    result["short_logits"] = model(tokens[:1, :9]).logits[0].contiguous()
model.train()
model.gradient_checkpointing_enable()
loss = model(tokens, labels=tokens).loss
loss.backward()
result["loss"] = loss.detach()
result["grad"] = model.model.layers[0].self_attn.q_proj.weight.grad
model.save_pretrained(directory + "-again")
save_file(result, out)
"""


def export(folder: Path, position: Position, tokenizer_dir: Path | None = None, **shape) -> ModelConfig:
    config = ModelConfig(Architecture(**{**SHAPE, **shape}), position, trained_length=TRAINED)
    model = build_model(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # at initialisation attention is almost uniform, and positions hardly matter
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
    write_model_dir(folder, config, model.state_dict(), tokenizer_dir=tokenizer_dir)
    return config


ELSEWHERE = f"""
import sys
sys.meta_path = [f for f in sys.meta_path if 'editable' not in f'{{f}} {{getattr(f, "__module__", "")}}']
sys.path = [p for p in sys.path if p != {str(Path(__file__).parents[2])!r}]
script, *folders = sys.argv[1:]
for folder in folders:
    print(folder)
    sys.argv[1:] = folder, folder + ".safetensors"
    exec(script, {{}})
"""


def run_elsewhere(folders: list[Path], script: str) -> dict[str, dict[str, torch.Tensor]]:
    """Runs a script on each folder and returns the tensors that it saved, by folder name.

    One process serves all folders, because importing transformers takes nine seconds.
    """
    (parent,) = {folder.parent for folder in folders}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(parent / "hf"), "HF_HUB_OFFLINE": "1"}
    # -P and another folder: modules come neither from the script's folder nor from here; -S would hide pip's packages.
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, script, *map(str, folders)],
        cwd=parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return {folder.name: load_file(f"{folder}.safetensors") for folder in folders}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Models with all position mechanisms, their configs, and the outputs of transformers."""
    parent = tmp_path_factory.mktemp("exported")
    configs = {
        name: export(parent / name, position, qk_norm=name == "mixed", tie_embeddings=name == "alibi")
        for name, position in POSITIONS.items()
    }
    return parent, configs, run_elsewhere([parent / name for name in POSITIONS], LOADER)


@pytest.mark.parametrize("name", POSITIONS)
def test_exported_model_equals_ours(exported, name):
    parent, configs, results = exported
    folder, config, result = parent / name, configs[name], results[name]
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert values["model_type"] == "farsight"

    model, _ = load_model(folder)
    tokens = torch.randint(96, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for length in (40, 60):
            set_length(model, config, length)
            torch.testing.assert_close(result[f"logits_{length}"], model(tokens[:, :length]), atol=1e-4, rtol=0)
    torch.testing.assert_close(result["padded_logits"], result["short_logits"], atol=1e-4, rtol=0)
    assert torch.equal(result["cached"], result["uncached"])
    assert torch.equal(result["batched"], result["single"])
    greedy = tokens[:, :30]
    with torch.no_grad():
        for _ in range(12):
            set_length(model, config, greedy.shape[1])
            greedy = torch.cat([greedy, model(greedy)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(result["cached"], greedy)

    set_length(model, config, 60)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    loss = model(tokens, labels=labels) / (2 * 59)
    torch.testing.assert_close(result["loss"], loss.detach(), atol=1e-4, rtol=0)
    (grad,) = torch.autograd.grad(loss, model.layers["0"].attention.wq.weight)
    torch.testing.assert_close(result["grad"], grad, atol=1e-5, rtol=1e-3)

    # A model that transformers saved again is still one of ours and keeps its code.
    again = parent / f"{name}-again"
    assert (again / "modeling_farsight.py").is_file()
    assert read_model_config(again).position == config.position
    with torch.no_grad():
        set_length(reloaded := load_model(again)[0], config, 60)
        assert torch.equal(reloaded(tokens), model(tokens))


HARNESS = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
directory, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
assert tokenizer.pad_token is None
tokenizer.pad_token = tokenizer.eos_token
tokenizer.truncation_side = tokenizer.padding_side = "left"
config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
how = dict(config=config, device_map="auto", trust_remote_code=True)
try:
    AutoModelForCausalLM.from_pretrained(directory, attn_implementation="flash_attention_2", **how)
except ImportError as error:  # of the package, which is not there; and not that the model is none for it
    assert "installed" in str(error), error
model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32, **how)
stops = model.generation_config.eos_token_id
stops = stops if isinstance(stops, list) else [stops]
result = {"stops": torch.tensor(stops)}
text = ["the river runs under seven stones", "a stone"]
inputs = tokenizer([text[0]], return_tensors="pt", max_length=24, truncation=True, padding=True)
result["ids"] = inputs.input_ids
limits = dict(max_new_tokens=12, min_new_tokens=0, do_sample=False, temperature=0.0, top_p=1.0, eos_token_id=stops)
limits |= dict(pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True, output_scores=False)
with torch.no_grad():  # all but the last token read by the decoder without its head, then generate with what it kept
    read = model.model(input_ids=inputs.input_ids[..., :-1], attention_mask=inputs.attention_mask[..., :-1])
    outputs = model.generate(**inputs, past_key_values=read.past_key_values, **limits)
result["prefilled"] = outputs["sequences"][:, inputs.input_ids.shape[1]:].contiguous()
both = tokenizer(text, return_tensors="pt", padding=True)
result["padded"] = model.generate(**both, **limits)["sequences"][:, both.input_ids.shape[1]:].contiguous()
result["short"] = tokenizer(text[1], return_tensors="pt").input_ids
result["logits"] = model(inputs.input_ids).logits.detach()
bf16 = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.bfloat16, **how)
result["bf16_logits"] = bf16(inputs.input_ids).logits.detach().float()
result["bf16_answer"] = bf16.generate(**inputs, **limits)["sequences"]
save_file(result, out)
"""


def test_harnesses_find_what_they_expect_of_generate(tmp_path):
    """Called as by HELMET (model_utils.py, HFModel), and partly L-Eval and LOFT: left-padded batches, a pre-filled cache,
    stop tokens from the model's own settings, flash attention by name, bf16, a device map."""
    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "tokenizer")
    config = export(tmp_path / "model", MIXED, tokenizer_dir=tmp_path / "tokenizer", vocab_size=260)
    result = run_elsewhere([tmp_path / "model"], HARNESS)["model"]
    assert result["stops"].tolist() == [257]
    text = b"the river runs under seven stones"
    assert result["ids"][0].tolist() == [256, *text[-23:]]

    model, _ = load_model(tmp_path / "model")

    def greedy(ids: list[int]) -> list[int]:
        written: list[int] = []
        while len(written) < 12 and 257 not in written:
            set_length(model, config, len(ids) + len(written))
            with torch.no_grad():
                written.append(int(model(torch.tensor([ids + written]))[0, -1].argmax()))
        return written

    assert result["prefilled"][0].tolist() == greedy(result["ids"][0].tolist())
    assert result["short"][0].tolist() == [256, *b"a stone"]
    short = greedy([256, *b"a stone"])
    assert result["padded"][1].tolist()[: len(short)] == short
    assert result["padded"][0].tolist() == greedy([256, *text])
    error = (result["bf16_logits"] - result["logits"]).abs().max()
    assert error < 0.05 * result["logits"].abs().max()
    assert result["bf16_answer"].shape[1] > result["ids"].shape[1]


TRAINER = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
directory, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
rows = torch.randint(96, (8, 40), generator=torch.Generator().manual_seed(1))
labels = rows.clone()
labels[1::2, 10:30] = -100  # rows that count for less
data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]
arguments = TrainingArguments(
    directory + "-run", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1,
    optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0, use_cpu=True, save_strategy="no",
    report_to=[], disable_tqdm=True, train_sampling_strategy="sequential", gradient_checkpointing=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
trainer.save_model(directory + "-trained")
save_file({"rows": rows, "labels": labels}, out)
"""


BY_TRAINER = ["scope_lasp", "mixed"]


@pytest.fixture(scope="module")
def trained_elsewhere(tmp_path_factory):
    parent = tmp_path_factory.mktemp("trained")
    for name in BY_TRAINER:
        export(parent / name, POSITIONS[name])
    return parent, run_elsewhere([parent / name for name in BY_TRAINER], TRAINER)


@pytest.mark.parametrize("name", BY_TRAINER)
def test_a_plain_trainer_takes_the_steps_that_the_equations_give(trained_elsewhere, name):
    parent, batches = trained_elsewhere
    folder, batch = parent / name, batches[name]
    model, config = load_model(folder)
    set_length(model, config, 40)
    for step in range(2):
        rows, labels = (batch[key][4 * step : 4 * step + 4] for key in ("rows", "labels"))
        log_p = model(rows)[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(0))[..., 0]
        counts = labels[:, 1:] != -100
        loss = -log_p[counts].sum() / counts.sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.1 * grad
    trained = load_model(parent / f"{name}-trained")[0]
    start = load_model(folder)[0]
    for key, value in trained.state_dict().items():
        moved = value - start.state_dict()[key]
        expected = model.state_dict()[key] - start.state_dict()[key]
        torch.testing.assert_close(moved, expected, atol=2e-6, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


ASKED_FOR = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache
directory, out = sys.argv[1:]
shape = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, head_dim=8,
             num_key_value_heads=4, max_position_embeddings=64)
torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=dict(rope_type="default", rope_theta=500.0))).eval()
inv_freq = [500.0 ** (-i / 4) for i in range(4)]
kind = dict(rotary=0, scopes=None, scope_ranks=None, alibi_slopes=None)
own = type(AutoConfig.from_pretrained(directory, trust_remote_code=True))
ours = AutoModelForCausalLM.from_config(
    own(**shape, rms_norm_eps=llama.config.rms_norm_eps, layer_kinds=[0] * 3, kinds=[kind], trained_length=64,
        rotaries=[dict(inv_freq=inv_freq, attention_factor=1.0)],
        auto_map=dict(AutoModelForCausalLM=directory + "--modeling_farsight.FarsightForCausalLM")), trust_remote_code=True
).eval()
ours.load_state_dict(llama.state_dict())
tokens = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
result = {}
with torch.no_grad():
    for name, model in (("ours", ours), ("llama", llama)):
        given = model(tokens, output_hidden_states=True)
        result[name] = torch.stack(given.hidden_states)
        result[name + "_last"] = model.model(tokens, output_hidden_states=True).hidden_states[-1].contiguous()
        assert model(tokens).hidden_states is None
    ours.config.output_hidden_states = True
    result["by_config"] = torch.stack(ours(tokens).hidden_states)
    ours.config.output_hidden_states = False
    def refused(**more):
        try:
            ours(tokens, **more)
        except ValueError as error:
            return str(error)
    message = refused(past_key_values=StaticCache(config=ours.config, max_cache_len=64))
    assert "StaticCache gives 64 keys for 20 tokens: this model takes a DynamicCache" in message, message
    assert "output_attentions is not supported" in refused(output_attentions=True)
save_file(result, out)
"""


def test_hidden_states_are_llama_s_and_what_is_not_supported_is_said(tmp_path):
    """The same weights in `transformers`' Llama and in our modelling file with dense heads and one RoPE."""
    export(tmp_path / "model", POSITIONS["nope"])
    result = run_elsewhere([tmp_path / "model"], ASKED_FOR)["model"]
    assert result["ours"].shape == (4, 2, 20, 64)  # after the embedding and after each layer
    torch.testing.assert_close(result["ours"], result["llama"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(result["ours_last"], result["llama_last"], atol=1e-5, rtol=1e-4)
    assert torch.equal(result["by_config"], result["ours"])


def test_an_older_transformers_is_told_which_one_it_takes(tmp_path):
    export(tmp_path / "model", POSITIONS["nope"])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["transformers_version"] == "5.0.0"
    assert "`transformers` >= 5" in (tmp_path / "model" / "README.md").read_text()
    (tmp_path / "transformers.py").write_text('__version__ = "4.57.1"\nGenerationMixin = PreTrainedModel = object\n')
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path[:0] = ['.', 'model']; import modeling_farsight"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ImportError: This model needs transformers 5 or later, and 4.57.1 is installed: pip install" in done.stderr
