"""Generation with a cache: every token against a forward pass over the whole sequence without one."""

import io
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.convert.from_hf import model_dir_to_checkpoint
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.finetuning import InstructionData
from farsight.configs.schema import Architecture, Position
from farsight.configs.typed import from_dict
from farsight.data.instructions.chat import chat_template
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.generate import completions
from farsight.inference.generate.__main__ import main
from farsight.inference.generate.completions import encode_prompt, generate
from farsight.inference.loading import LoadedModel
from farsight.inference.sampling import Sampling, choose
from farsight.inference.text_stream import TextStream
from farsight.model.build import ModelConfig, build_model, set_length
from tests.checkpoints.test_adapter import trained_adapter
from tests.finetuned import write_base
from tests.running import forked

ARCHITECTURE = Architecture(vocab_size=258, dim=64, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=96)
TRAINED = 32
LENGTHS, NEW = (45, 6, 23), 8

POSITIONS = {
    "rope": {},
    "yarn": {"rotary": {"kind": "yarn", "factor": 4.0, "original_length": 16}},
    "scope, sorted": {"heads": {"kind": "scope", "layout": "sorted"}},
    "scope, interleaved": {"heads": {"kind": "scope", "layout": "interleaved"}},
    "scope, group_balanced": {"heads": {"kind": "scope", "layout": "group_balanced"}},
    "scope that grows": {"heads": {"kind": "scope", "layout": "group_balanced", "scope_max": "length"}},
    "lasp": {"lasp": {"s_max": 4.0, "b_min": 1e4, "b_max": 4e4, "anchor_layers": 1}},
    "alibi": {"rotary": {"kind": "none"}, "bias": {"kind": "alibi"}},
    "nope": {"rotary": {"kind": "none"}},
    "sinusoidal": {"rotary": {"kind": "none"}, "embedding": "sinusoidal"},
    "window": {"heads": {"kind": "window", "window": 6}},
    "dynamic ntk": {"rotary": {"kind": "dynamic", "factor": 2.0, "original_length": 32}},
    "longrope": {
        "rotary": {
            "kind": "longrope", "factor": 2.0, "original_length": 32,
            "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0],
        }
    },
    "garfa, keys": {"garfa": {"layers": [{"layer": 1, "raw": [0.5, -1.0, -2.0, 2.0]}]}},
    "garfa, queries too": {"garfa": {"queries": True, "layers": [{"layer": 0, "raw": [0.5, -1.0, -2.0, 2.0]}]}},
    "mixed": {
        "heads": {"kind": "scope", "layout": "group_balanced"},
        "lasp": {"s_max": 4.0, "b_min": 1e4, "b_max": 4e4, "anchor_layers": 1},
        "rules": [
            {"layers": "1", "rotary": {"kind": "none"}, "heads": {"kind": "dense"}, "bias": {"kind": "alibi"}},
            {"layers": "2", "heads": {"kind": "window", "window": 5}},
        ],
    },
}  # fmt: skip


def make_model(position, **architecture):
    config = ModelConfig(replace(ARCHITECTURE, **architecture), from_dict(Position, position, "position"), TRAINED)
    model = build_model(config)
    model.init_weights()
    with torch.no_grad():  # logits far apart, and attention that is not nearly uniform
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model.eval(), config


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def forward(model, config, tokens, length):
    """Logits [L, V] of the plain forward pass, with positions set for `length`."""
    set_length(model, config, length)
    return model(torch.tensor([tokens]))[0]


class EndlessTokenizer(BytesTokenizer):
    """A tokenizer without an end token, so that rows reach their full length."""

    eos_id = None


@pytest.mark.parametrize("name", POSITIONS)
def test_cached_generation_equals_the_uncached_forward(name):
    """Prompts of unequal length, longer than every scope but the last, in chunks of any size."""
    model, config = make_model(POSITIONS[name], qk_norm=name == "mixed")
    rows = prompts()
    for chunk in (1, 7, 64):
        completions = generate(Decoder(model, config, chunk=chunk), EndlessTokenizer(), rows, NEW)
        for prompt, completion in zip(rows, completions, strict=True):
            tokens = [*prompt, *completion.tokens]
            assert len(completion.tokens) == NEW
            assert completion.ended == "length"
            logits_LV = forward(model, config, tokens, len(tokens))[len(prompt) - 1 : -1]
            assert logits_LV.argmax(-1).tolist() == list(completion.tokens), (chunk, len(prompt))
    hidden = Decoder(model, config, chunk=9).hidden_states(torch.tensor(rows[0]))
    torch.testing.assert_close(model.head(hidden), forward(model, config, rows[0], LENGTHS[0]), rtol=1e-4, atol=1e-4)


def test_logits_of_every_step_and_several_caches_at_once():
    """Two sequences of different lengths, read alternately through one model whose scopes follow the length."""
    model, config = make_model(POSITIONS["scope that grows"])
    decoder, (first, second) = Decoder(model, config, chunk=16), prompts((50, 80))
    rows = [decoder.start([50], 2), decoder.start([80], 2)]
    found = [
        torch.cat(list(row.chunks(torch.tensor([p]))), dim=1) for row, p in zip(rows, (first, second), strict=True)
    ]
    for _ in range(2):
        found = [torch.cat((h, row.read(torch.tensor([[7]]))), dim=1) for h, row in zip(found, rows, strict=True)]
    for h, prompt, length in zip(found, (first, second), (52, 82), strict=True):
        exact = forward(model, config, [*prompt, 7, 7], length)
        torch.testing.assert_close(decoder.logits(h)[0], exact, rtol=1e-4, atol=1e-4)
    assert all(attention.context is None for _, attention in model.attentions())


@pytest.mark.parametrize(("layout", "most"), [("sorted", 0.165), ("group_balanced", 0.165), ("interleaved", 0.385)])
def test_bytes_reported_are_bytes_allocated(layout, most):
    """With real tensors at a small size, and on the meta device with 131,072 tokens, 32 query heads and 8 key-value heads."""
    model, config = make_model({"heads": {"kind": "scope", "layout": layout}})
    rows = Decoder(model, config).start([300, 100], 20)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in rows.caches.values()
        for tensor in (layer.cache.keys_BSH, layer.cache.values_BSH)
    }
    assert rows.nbytes == sum(held.values())
    assert rows.dense_nbytes == 3 * 2 * 4 * 2 * 320 * 8 * 4

    T, a = 131_072, Architecture(vocab_size=32, dim=64, n_layers=2, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=64)
    large = ModelConfig(a, from_dict(Position, {"heads": {"kind": "scope", "layout": layout}}, "position"), T)
    with torch.device("meta"):
        rows = Decoder(build_model(large), large).start([T])
    scopes = [-(-(T ** (h / 32)) // 1) for h in range(1, 33)]
    if layout == "sorted":  # every fourth scope is the widest of its group
        assert rows.nbytes / rows.dense_nbytes == pytest.approx(sum(scopes[3::4]) / (8 * T), abs=1e-4)
    assert rows.nbytes / rows.dense_nbytes <= most


def test_a_row_that_ends_leaves_the_others_alone():
    model, config = make_model({})
    rows = prompts()
    alone = [generate(Decoder(model, config), BytesTokenizer(), [row], NEW)[0] for row in rows]
    assert generate(Decoder(model, config), BytesTokenizer(), rows, NEW, rows_at_once=2) == alone
    endings = EndlessTokenizer()
    endings.eos_id = generate(Decoder(model, config), EndlessTokenizer(), rows, NEW)[1].tokens[3]
    ended = generate(Decoder(model, config), endings, rows, NEW)[1]
    assert ended.ended == "end token"
    assert ended.tokens[-1] == endings.eos_id
    assert endings.eos_id not in ended.tokens[:-1]


def test_sampling_is_seeded_by_row():
    model, config = make_model({})
    sampling, rows = Sampling(temperature=1.5, top_p=0.9, seed=3), prompts()
    together = generate(Decoder(model, config), EndlessTokenizer(), rows, NEW, sampling)
    for number, row in enumerate(rows):
        single = generate(Decoder(model, config), EndlessTokenizer(), [row], NEW, replace(sampling, seed=3 + number))
        assert single == [together[number]]
    other = generate(Decoder(model, config), EndlessTokenizer(), rows, NEW, replace(sampling, seed=9))
    assert [c.tokens for c in other] != [c.tokens for c in together]


def test_draws_follow_temperature_and_nucleus():
    """Frequencies of many draws against a softmax written out here."""
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
    probabilities = torch.exp(logits / 0.7) / torch.exp(logits / 0.7).sum()
    kept = probabilities.clone()
    kept[torch.tensor([False, False, True, True, True])] = 0  # the two likeliest are the fewest that reach 0.85
    assert probabilities[0] < 0.85 <= probabilities[:2].sum()
    for top_p, expected in ((1.0, probabilities), (0.85, kept / kept.sum())):
        sampling = Sampling(temperature=0.7, top_p=top_p)
        drawn = choose(logits.expand(20_000, -1), sampling, [torch.Generator().manual_seed(0)] * 20_000)
        torch.testing.assert_close(drawn.bincount(minlength=5) / 20_000, expected, rtol=0, atol=0.012)
    assert choose(logits[None], Sampling(), []).tolist() == [0]
    assert choose(logits[None], Sampling(1.0, 1e-6), [torch.Generator()]).tolist() == [0]
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match="set"):
            Sampling(**wrong)


def test_text_comes_whole_and_ends_before_a_stop_string():
    """Characters of several bytes, and stop strings that begin but are not completed."""
    tokenizer, text = BytesTokenizer(), "naïve — 漢字 stopping at\n\nEND of it"
    for stop, expected in (
        (["END"], "naïve — 漢字 stopping at\n\n"),
        (["STOP", "\n\n"], "naïve — 漢字 stopping at"),
        ([], text),
    ):
        stream, pieces = TextStream(tokenizer, tokenizer.encode("before"), stop), []
        for token in tokenizer.encode(text):
            pieces.append(stream.push(token))
        pieces.append(stream.finish())
        assert "".join(pieces) == stream.text == expected
        assert all("\ufffd" not in piece for piece in pieces)
        assert stream.ended == ("stop string" if stop else None)


def test_prompts_start_as_documents_do():
    tokenizer = BytesTokenizer()
    assert encode_prompt(tokenizer, "ab") == [256, 97, 98]
    chat = tokenizer.decode(encode_prompt(tokenizer, "hello", chat=True)[1:])
    assert "user<|end_header_id|>\n\nhello<|eot_id|>" in chat
    assert chat.endswith("assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("tied", [True, False])
def test_command_on_a_directory_a_checkpoint_and_two_processes(tied, tmp_path, capsys):
    """Tensor parallelism divides heads, hidden units and vocabulary; the text is that of one process."""
    position = POSITIONS["garfa, queries too"] | {"heads": {"kind": "scope", "layout": "sorted"}}
    model, config = make_model(position, tie_embeddings=tied, qk_norm=tied)
    directory, result = tmp_path / "model", tmp_path / "result.json"
    write_model_dir(directory, config, dict(model.named_parameters()))
    BytesTokenizer().save(directory)
    texts = ["some prompt that is longer than any scope of the model", "short", "ends"]
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    command = [str(directory), "--prompts", str(tmp_path / "prompts.jsonl"), "--new-tokens", "9", "--json", str(result)]
    encoded = [encode_prompt(BytesTokenizer(), text) for text in texts]
    expected = [list(c.tokens) for c in generate(Decoder(model, config), BytesTokenizer(), encoded, 9)]

    main([*command, "--chunk", "16"])
    found = json.loads(result.read_text())
    assert [row["tokens"] for row in found["completions"]] == expected
    printed = capsys.readouterr()
    assert found["completions"][0]["text"] in printed.out
    usage = found["usage"]
    assert usage["tokens_read"] == sum(map(len, encoded))
    assert f"{usage['cache_bytes'] / usage['dense_cache_bytes']:.3f} of a dense one" in printed.err

    if tied:
        model_dir_to_checkpoint(directory, tmp_path / "step-1")
        main([str(tmp_path / "step-1"), *command[1:]])
        assert [row["tokens"] for row in json.loads(result.read_text())["completions"]] == expected
    done = forked([*command], tmp_path / "printed", ranks=2, script="inference/generate/__main__.py")
    assert done.returncode == 0, done.stderr
    assert [row["tokens"] for row in json.loads(result.read_text())["completions"]] == expected
    divided = json.loads(result.read_text())["usage"]
    assert [divided[k] for k in ("cache_bytes", "dense_cache_bytes")] == [
        usage["cache_bytes"],
        usage["dense_cache_bytes"],
    ]


def test_adapter_on_a_four_bit_base(tmp_path):
    write_base(tmp_path / "base")
    trained_adapter(tmp_path / "adapter", tmp_path / "base", "nf4")
    model, config = load_adapter(tmp_path / "adapter")
    (completion,) = generate(Decoder(model, config, chunk=5), EndlessTokenizer(), [list(range(20))], 6)
    exact, _ = load_adapter(tmp_path / "adapter")
    with torch.no_grad():
        logits_LV = exact(torch.tensor([[*range(20), *completion.tokens]]))[0, 19:-1, :258]
    assert logits_LV.argmax(-1).tolist() == list(completion.tokens)


def test_an_adapter_s_texts_end_as_its_base_s(tmp_path):
    write_base(tmp_path / "base")
    trained_adapter(tmp_path / "adapter", tmp_path / "base")
    for name, ends in (("config.json", [7, 9]), ("generation_config.json", 5)):  # the later one is read first
        path = tmp_path / "base" / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), "eos_token_id": ends}))
        loaded = LoadedModel(tmp_path / "adapter", None, BytesTokenizer(), 128)
        assert loaded.end_tokens == {BytesTokenizer.eos_id, *([ends] if isinstance(ends, int) else ends)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_rows_and_chunks_apart(dtype):
    """The cache has the weights' dtype; rows alone, together and in other chunks choose the same tokens."""
    model, config = make_model(POSITIONS["scope, interleaved"])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    alone = [generate(Decoder(model, config), EndlessTokenizer(), [row], NEW)[0] for row in prompts()]
    assert generate(Decoder(model, config, chunk=7), EndlessTokenizer(), prompts(), NEW) == alone
    rows = Decoder(model, config).start([10])
    assert {layer.cache.keys_BSH.dtype for layer in rows.caches.values()} == {dtype}


def test_a_chat_ends_where_its_turns_do(tmp_path):
    """Llama 3's template ends a turn with a token that is not the tokenizer's end token."""
    fast = Tokenizer(WordLevel({"<unk>": 0, "Hi": 1, "x": 2, "y": 3}, unk_token="<unk>"))
    fast.pre_tokenizer = Whitespace()
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    fast.add_special_tokens(names)
    fast.save(str(tmp_path / "tokenizer.json"))
    ends = {"bos_token": names[0], "eos_token": names[1]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ends))
    tokenizer = load_tokenizer_dir(tmp_path)
    template = chat_template(InstructionData(), tokenizer)
    assert tokenizer.eos_id == fast.token_to_id(names[1])
    assert template.turn_end() == fast.token_to_id("<|eot_id|>")
    stream = TextStream(tokenizer, [1], (), {tokenizer.eos_id, template.turn_end()})
    assert [stream.push(token) for token in (1, template.turn_end(), 1)] == [" Hi", "", ""]
    assert stream.ended == "end token"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with its model, and a recipe's folder with a stage like it."""
    folder = tmp_path_factory.mktemp("runs")
    model, config = make_model({})
    BytesTokenizer().save(folder / "tokenizer")
    for name in ("run", "recipe/long"):
        (folder / name).mkdir(parents=True)
        write_model_dir(folder / name / "model", config, model.state_dict(), tokenizer_dir=folder / "tokenizer")
    model_dir_to_checkpoint(folder / "run" / "model", folder / "other" / "checkpoint" / "step-7")
    return folder


def ends_with_2(capsys, *arguments: str) -> str:
    """The message that the command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--prompt", "x"])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_folders_above_a_model_lead_to_it(run_folder, capsys):
    for folder, model in (("run", "run/model"), ("recipe", "recipe/long/model"), ("other", "other/checkpoint/step-7")):
        said = ends_with_2(capsys, str(run_folder / folder))
        assert f"is not a model directory: it has no config.json. Did you mean {run_folder / model}?" in said
    assert "Did you mean" not in ends_with_2(capsys, str(run_folder / "tokenizer"))


def test_options_that_cannot_be_used(run_folder, capsys):
    model = str(run_folder / "run" / "model")
    for option, value, says in (
        ("--device", "gpu", "'gpu' is not a device; write cpu, cuda"),
        ("--temperature", "nan", "nan must be a finite number"),
        ("--top-p", "0", "0 must be more than 0 and at most 1"),
        ("--top-p", "0.9", "--top-p goes with a --temperature above 0"),
        ("--new-tokens", "0", "0 must be at least 1"),
        ("--rows", "2.5", "'2.5' is not a whole number"),
        ("--json", str(run_folder), "is a folder; name a file"),
        ("--json", f"{run_folder}/run/model/config.json/f.json", "its folder can't be made"),
        ("--extend", "nothing", "nothing"),
    ):
        assert says in ends_with_2(capsys, model, option, value), option
    if not torch.accelerator.is_available():
        assert "finds no accelerator on this machine" in ends_with_2(capsys, model, "--device", "cuda")


def test_a_prompt_longer_than_the_training_is_said_to_be(run_folder, tmp_path, capsys):
    command = [str(run_folder / "run" / "model"), "--new-tokens", "1", "--device", "cpu", "--prompt"]
    main([*command, "x" * (TRAINED - 1)])
    assert "warning" not in capsys.readouterr().err
    main([*command, "x" * TRAINED, "--json", str(tmp_path / "new" / "f.json")])
    assert (
        f"has {TRAINED + 1} tokens, and {command[0]} was trained on sequences of {TRAINED}" in capsys.readouterr().err
    )
    assert (tmp_path / "new" / "f.json").is_file()
    main([*command, "x" * TRAINED, "--extend", "yarn:2"])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_weight_is_named(value, run_folder, tmp_path, capsys):
    """They must not become an empty text with status 0. Finite weights may also give logits that are not finite."""
    path = shutil.copytree(run_folder / "run" / "model", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value
    save_file(tensors, path / "model.safetensors")
    said = ends_with_2(capsys, str(path), "--device", "cpu")
    assert f"{path} gives logits that are infinite or not a number" in said
    assert "its tensor model.layers.1.mlp.up_proj.weight" in said
    model, config = make_model({})
    with torch.no_grad():
        model.output.weight.mul_(1e38).mul_(1e3).clamp_(-3e38, 3e38)
    with pytest.raises(ConfigError, match="though its weights are finite: they overflow in float32"):
        generate(Decoder(model, config), BytesTokenizer(), [[1, 2]], 2)


def test_text_that_no_encoding_has(run_folder, tmp_path, monkeypatch, capsys):
    """Bytes may spell half of a surrogate pair, and standard input may not be text."""
    monkeypatch.setattr(completions, "written", lambda *_: ([byte] for byte in b"a\xed\xa0\x80b"))
    model, out = str(run_folder / "run" / "model"), tmp_path / "f.json"
    main([model, "--prompt", "x", "--new-tokens", "5", "--device", "cpu", "--json", str(out)])
    assert json.loads(out.read_text())["completions"][0]["text"] == "a\ud800b"
    assert capsys.readouterr().out == "a\\ud800b\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb")))
    with pytest.raises(SystemExit, match="standard input is not UTF-8"):
        main([model, "--prompt-file", "-", "--device", "cpu"])


def test_progress_in_a_log(run_folder, monkeypatch, capsys):
    monkeypatch.setattr("farsight.progress.DELAY", 0.0)
    monkeypatch.setattr("farsight.progress.INTERVAL", 0.0)
    prompts = ["--prompt", "a prompt", "--prompt", "another one"]
    main([str(run_folder / "run" / "model"), *prompts, "--new-tokens", "3", "--device", "cpu"])
    assert re.search(
        r"^read: 21 of 21 \(token\), .+token/s, .+ left, 1 tokens written$", capsys.readouterr().err, re.MULTILINE
    )


def test_what_cannot_be_generated_from():
    model, config = make_model({})
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        generate(Decoder(model, config), BytesTokenizer(), [[1], []], 4)
    rows = Decoder(model, config).start([10], 2)
    rows.read(torch.zeros(1, 11, dtype=torch.int64))
    with pytest.raises(ValueError, match="11 tokens were read and 2 are to be: these rows were started for 12"):
        rows.read(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="chunk is 0"):
        Decoder(model, config, chunk=0)
