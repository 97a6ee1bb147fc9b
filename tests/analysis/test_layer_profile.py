"""farsight layers: the paper's own table, delta and rho against transformers, rank statistics against scipy."""

import copy
import json
import math
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from farsight.analysis.layers.__main__ import main
from farsight.analysis.layers.agreement import Overlap, p_value, spearman
from farsight.analysis.layers.measure import compare, rope_influence
from farsight.analysis.layers.picture import draw
from farsight.analysis.layers.rows import Rows, mean_loss, read_rows
from farsight.analysis.layers.sensitivity import OWN_PAIRS, Pair, layer_means, over_domains, read_pairs, sensitivity
from farsight.analysis.layers.table import table
from farsight.checkpoints.load import load_model
from farsight.configs.finetuning import Base, FinetuneConfig, GarfaTraining, Lora
from farsight.configs.schema import Architecture, LayerRule, NoRotary, Position, Rope, Tokenizer
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.extend import parse_extension
from farsight.model.adapt.layers import adapted
from farsight.model.adapt.quantized import dequantize
from farsight.model.build import ModelConfig
from tests.checkpoints.test_convert import write_with_transformers
from tests.model.test_model import SMALL, fresh_model
from tests.running import ROOT

TABLE_7 = ROOT / "configs/finetune/llama3.1_8b_profile.json"
TOKENS = torch.randint(320, (2, 40), generator=torch.Generator().manual_seed(3))


def decoder_of(folder, chunk=16) -> Decoder:
    model, config = load_model(folder)
    return Decoder(model.eval(), config, chunk=chunk)


def test_the_papers_table(tmp_path, capsys):
    main(["--profile", str(TABLE_7), "--json", str(tmp_path / "f.json"), "--picture", str(tmp_path / "f.svg")])
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "f.json").read_text())
    assert "-0.758 (signed, p = 5e-07), +0.758 (absolute, p = 5e-07)" in printed
    assert "top 10 by delta: 0 23 24 25 26 27 28 29 30 31\n" in printed
    assert "top 10 by |rho|: 21 22 23 25 26 27 28 29 30 31\n" in printed
    assert "top 10 by signed rho: 0 1 2 3 4 5 6 7 8 9  (the smallest |rho|)\n" in printed
    printed_there = json.loads(TABLE_7.read_text())
    for key, rho in (("signed", printed_there["rho"]), ("absolute", [abs(value) for value in printed_there["rho"]])):
        theirs = stats.spearmanr(printed_there["delta"], rho)
        assert figures[f"spearman_{key}"] == pytest.approx(theirs.statistic)
        assert figures[f"p_{key}"] == pytest.approx(theirs.pvalue, rel=1e-9)
    assert figures["top"]["delta"] == [0, *range(23, 32)]
    assert figures["top"]["absolute_rho"] == [21, 22, 23, *range(25, 32)]  # 23 and 24 tie
    assert figures["top"]["rho"] == [*range(10)]
    assert (figures["overlap"], figures["overlap_expected"]) == (8, 3.125)
    assert figures["shared"]["rho"]["layers"] == [0]
    drawn = (tmp_path / "f.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {layer} -->" in drawn for layer in range(32))
    assert "<!-- top by delta and |rho| -->" in drawn
    assert "<!-- Spearman of delta with rho -0.758 (signed, p = 5e-07), +0.758 (absolute, p = 5e-07) -->" in drawn


def test_rank_statistics_equal_scipys():
    random.seed(0)
    for _ in range(50):
        n = random.randint(2, 20)
        a, b = ([random.randint(0, 6) / 3 for _ in range(n)] for _ in range(2))
        if len({*a}) == 1 or len({*b}) == 1:
            assert spearman(a, b) is None
            continue
        theirs = stats.spearmanr(a, b)
        assert (found := spearman(a, b)) == pytest.approx(theirs.statistic, abs=1e-12)
        if n > 2:
            assert p_value(found, n) == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-7)
        first, second = (random.sample(range(n), random.randint(1, n)) for _ in range(2))
        chance, found = stats.hypergeom(n, len(first), len(second)), Overlap.of(first, second, n)
        shared = len({*first} & {*second})
        assert found.layers == tuple(sorted({*first} & {*second}))
        assert (found.expected, found.at_most, found.at_least) == pytest.approx(
            (sum(k * chance.pmf(k) for k in range(n + 1)), chance.cdf(shared), chance.sf(shared - 1))
        )


@pytest.mark.parametrize("n", [3, 4, 5, 12, 32, 33, 80, 126])
def test_p_values_are_students(n):
    for r in (0.0, 0.1, -0.5, 0.735, -0.9, 0.99, -0.999):
        t = abs(r) * math.sqrt((n - 2) / (1 - r * r))
        assert p_value(r, n) == pytest.approx(2 * stats.t.sf(t, n - 2), rel=1e-9)
    assert p_value(1.0, n) == p_value(-1.0, n) == 0
    assert p_value(None, n) is p_value(0.5, 2) is None
    assert f"{p_value(-0.735, 32):.2e}" == "1.66e-06"  # the paper's


def test_leading_layers():
    rotates = [True, True, False, True, True, True]
    found = compare([0.5, 0.1, 0.3, 0.3, 0.1, 0.1], [-0.2, -0.2, 0.0, -0.1, -0.4, -0.1], rotates, 2)
    assert found["top"] == {
        "delta": [0, 2],
        "absolute_rho": [0, 4],
        "rho": [3, 5],
    }  # ties go to the lower layer; 2 has no rho
    assert compare([1.0, 2.0], [0.1, 0.2], [True, True], 10)["top"]["delta"] == [0, 1]
    nothing = compare([1.0, 2.0], [0.0, 0.0], [False, False], 1)
    assert (nothing["spearman_signed"], nothing["top"]["rho"], nothing["overlap"]) == (None, [], 0)
    assert "No layer rotates" in table({"delta": [1.0, 2.0], "rho": [0.0, 0.0], "rotates": [False, False], **nothing})


def test_delta_equals_the_equation_with_transformers_hidden_states(tmp_path):
    theirs = write_with_transformers(tmp_path / "m", "llama3", tied=False)
    last: list[torch.Tensor] = []  # transformers returns the last layer's after the norm
    theirs.model.layers[-1].register_forward_hook(lambda _, __, output: last.append(output))
    tokenizer = BytesTokenizer()

    def means(text):
        tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text)]])
        with torch.no_grad():
            states = theirs(tokens, output_hidden_states=True).hidden_states
        return torch.stack([*states[1:-1], last.pop()])[:, 0].double().mean(1)

    pairs = read_pairs(OWN_PAIRS)
    pairs = [*pairs[:2], *pairs[5:6], *pairs[-2:]]
    by_domain: dict[str, list[list[float]]] = {}
    for pair in pairs:
        distances = []
        for h, w in zip(means(pair.correct), means(pair.wrong), strict=True):
            distances.append(
                1 - float((h * w).sum()) / math.sqrt(float((h * h).sum())) / math.sqrt(float((w * w).sum()))
            )
        by_domain.setdefault(pair.domain, []).append(distances)
    expected = {domain: [sum(of) / len(of) for of in zip(*each, strict=True)] for domain, each in by_domain.items()}
    found = sensitivity(decoder_of(tmp_path / "m", chunk=7), tokenizer, pairs)
    assert list(found) == ["code", "knowledge", "maths"]
    for domain in found:
        assert found[domain] == pytest.approx(expected[domain], rel=1e-3, abs=1e-7)
    # Domains have equal weight, whatever their numbers of pairs.
    assert over_domains(found) == pytest.approx(
        [sum(expected[d][layer] for d in found) / 3 for layer in range(2)], rel=1e-3
    )
    assert min(over_domains(found)) > 1e-4


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_rho_equals_transformers_with_one_rotary_embedding_replaced(kind, tmp_path):
    """Against transformers, which computes frequencies and scaling from a config with twice the base."""
    theirs = write_with_transformers(tmp_path / "m", kind, tied=False)
    changed = copy.deepcopy(theirs.config)
    changed.rope_parameters["rope_theta"] *= 2
    tables = LlamaRotaryEmbedding(changed)(torch.zeros(1), torch.arange(39)[None])

    def loss():
        with torch.no_grad():
            logits = theirs(TOKENS[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), TOKENS[:, 1:].flatten()))

    plain, expected = loss(), []
    for block in theirs.model.layers:
        hook = block.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "position_embeddings": tables}), with_kwargs=True
        )
        expected.append(loss() - plain)
        hook.remove()
    baseline, rho = rope_influence(decoder_of(tmp_path / "m"), Rows.whole(TOKENS), 2.0)
    assert baseline == pytest.approx(plain, abs=1e-5)
    assert rho == pytest.approx(expected, abs=1e-5)
    assert min(map(abs, rho)) > 1e-4


def test_layers_without_rope_have_no_rho():
    position = Position(rotary=Rope(theta=100.0), rules=(LayerRule(layers="1", rotary=NoRotary()),))
    config = ModelConfig(SMALL, position, trained_length=32)
    _, rho = rope_influence(Decoder(fresh_model(config), config), Rows.whole(TOKENS[:1] % 96), 4.0)
    assert rho[1] == 0.0
    assert min(abs(rho[0]), abs(rho[2])) > 1e-4


def test_extensions_that_change_frequencies_go_together_with_a_changed_base():
    """The loss under --extend yarn:2 and a doubled base equals that of a model built with both."""
    config = ModelConfig(SMALL, Position(rotary=Rope(theta=100.0)), trained_length=20)
    extension, tokens = parse_extension("yarn:2"), Rows.whole(TOKENS[:1] % 96)
    longer = extension.change(config)
    baseline, rho = rope_influence(Decoder(fresh_model(longer), longer, extension), tokens, 2.0)
    rules = (LayerRule(layers="2", rotary=Rope(theta=200.0)),)
    both = extension.change(ModelConfig(SMALL, Position(rotary=Rope(theta=100.0), rules=rules), trained_length=20))
    assert mean_loss(Decoder(fresh_model(both), both), tokens) - baseline == pytest.approx(rho[2], abs=1e-6)
    whole = parse_extension("self_extend")
    with pytest.raises(ConfigError, match="--extend"):
        rope_influence(Decoder(fresh_model(config), config, whole), tokens, 2.0)
    with pytest.raises(ConfigError, match=r"--gamma 0\.005 .* layer 0 0\.5"):
        rope_influence(Decoder(fresh_model(config), config), tokens, 0.005)


def test_the_command_writes_a_profile_that_fine_tuning_reads(tmp_path, capsys):
    write_with_transformers(tmp_path / "m", "default", tied=False)
    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "m")
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i % 97}\n" for i in range(40)))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        '{"domain": "a", "correct": "one", "wrong": "two"}\n\n{"domain": "b", "correct": "x", "wrong": "y"}\n'
    )
    names = {name: str(tmp_path / name) for name in ("profile.json", "f.json", "f.png")}
    command = [
        str(tmp_path / "m"),
        "--data",
        str(tmp_path / "text.txt"),
        "--length",
        "48",
        "--sequences",
        "2",
        "--pairs",
    ]
    command += [
        str(pairs),
        "--gamma",
        "3",
        "--device",
        "cpu",
        "--out",
        names["profile.json"],
        "--json",
        names["f.json"],
    ]
    capsys.readouterr()  # what packages printed while they were imported
    main([*command, "--picture", names["f.png"]])
    figures, profile = (json.loads((tmp_path / name).read_text()) for name in ("f.json", "profile.json"))
    assert figures["tool"] == "analysis.layers"
    assert (figures["rows"], figures["targets"], figures["quantization"]) == ("windows", 94, None)
    assert (figures["model"], figures["gamma"], figures["length"], figures["sequences"]) == (
        str(tmp_path / "m"),
        3,
        48,
        2,
    )
    decoder = decoder_of(tmp_path / "m")
    text = torch.tensor(BytesTokenizer().encode((tmp_path / "text.txt").read_text())[:94]).view(2, 47)
    tokens = torch.nn.functional.pad(text, (1, 0), value=BytesTokenizer().bos_id)  # windows begin with the start token
    baseline, rho = rope_influence(decoder, Rows.whole(tokens), 3.0)
    assert [figures["baseline_loss"], *figures["rho"]] == pytest.approx([baseline, *rho], abs=2e-6)
    by_domain = sensitivity(decoder, BytesTokenizer(), [Pair("a", "one", "two"), Pair("b", "x", "y")])
    assert figures["domains"] == {domain: pytest.approx(deltas, abs=1e-6) for domain, deltas in by_domain.items()}
    assert (profile["delta"], profile["rho"]) == (figures["delta"], figures["rho"])
    assert figures["top"]["delta"] == [
        max(range(2), key=profile["delta"].__getitem__)
    ]  # a third of two layers is none, but at least one is listed

    config = FinetuneConfig(
        base_model=Base("unread"), lora=Lora(layers="sensitive:1"), layer_profile=names["profile.json"]
    )
    config.garfa = GarfaTraining(layers="sensitive:1")
    config.architecture = Architecture(n_layers=2)
    assert list(adapted(config).lora) == list(adapted(config).garfa) == figures["top"]["delta"]

    printed = capsys.readouterr().out
    main(["--profile", names["profile.json"]])
    shown = capsys.readouterr().out
    measured, _, rest = printed.partition("\n")
    assert measured.startswith("rho: 2 windows of 48 tokens (the model was trained at ")
    assert rest.startswith(shown)  # then the names of the files written


def test_windows_are_as_long_as_the_text_gives_them(tmp_path):
    tokenizer = BytesTokenizer()
    texts = ["x" * 50, "y" * 30, "z" * 9]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def windows(length=None, most=8, trained=131_072):
        rows = read_rows(tmp_path / "t.jsonl", tokenizer, length, most, trained, 300)
        assert all(int(row[0]) == tokenizer.bos_id for row in rows.tokens)
        assert len({len(row) for row in rows.tokens}) == 1
        return rows

    for most in range(1, 12):
        best = max(own for own in range(1, 51) if sum(len(text) // own for text in texts) >= most)
        rows = windows(most=most)
        assert (rows.length, len(rows.tokens)) == (1 + best, most)
    assert windows(most=8, trained=6).length == 6
    assert windows(length=31).tokens[1].tolist() == [tokenizer.bos_id] + [ord("y")] * 30
    assert windows(most=1000).length == 51  # there are not so many: the longest document's
    with pytest.raises(
        ConfigError, match=r"longest document has 50 tokens after the start token, so .* --length to 51"
    ):
        windows(length=52)
    (tmp_path / "t.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="longest document has 0 tokens"):
        windows()


INSTRUCTIONS = [
    {"instruction": f"add {n} and {n % 7}", "output": f"it is {n + n % 7}. " * (1 + n % 4)} for n in range(20)
]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_rows_of_instructions_are_those_of_the_template(tmp_path, kind):
    path, tokenizer = tmp_path / f"rows{kind}", BytesTokenizer()
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(INSTRUCTIONS), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in INSTRUCTIONS)
        path.write_text(lines if kind == ".jsonl" else json.dumps(INSTRUCTIONS))
    rows = read_rows(path, tokenizer, None, 5, 131_072, 300)
    assert (rows.kind, len(rows.tokens)) == ("instructions", 5)
    for row, tokens, counted in zip(INSTRUCTIONS, rows.tokens, rows.counted, strict=False):
        asked = f"<|start_header_id|>user<|end_header_id|>\n\n{row['instruction']}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        answer = f"{row['output'].strip()}<|eot_id|>"
        assert tokens.tolist() == [256, *asked.encode(), *answer.encode(), 257]
        assert counted.tolist() == [False] * (1 + len(asked)) + [True] * (len(answer) + 1)
    assert rows.length == max(map(len, rows.tokens))
    assert read_rows(path, tokenizer, 130, 5, 131_072, 300).length == 130
    with pytest.raises(
        ConfigError, match=r"none of its rows is a conversation with an answer within 40 tokens: set a larger --length"
    ):
        read_rows(path, tokenizer, 40, 5, 131_072, 300)


def test_the_loss_of_rows_is_that_of_transformers_on_their_answers(tmp_path):
    """Its own loss over labels, with -100 for what does not count, and every row by itself."""
    theirs = write_with_transformers(tmp_path / "m", "llama3", tied=False)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in INSTRUCTIONS))
    rows = read_rows(tmp_path / "rows.jsonl", BytesTokenizer(), None, 6, 4096, 300)
    total = 0.0
    for tokens, counted in zip(rows.tokens, rows.counted, strict=True):
        with torch.no_grad():
            loss = theirs(tokens[None], labels=torch.where(counted, tokens, -100)[None]).loss
        total += float(loss) * int(counted.sum())
    assert mean_loss(decoder_of(tmp_path / "m"), rows) == pytest.approx(
        total / sum(int(c.sum()) for c in rows.counted), rel=1e-5
    )


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_a_quantised_base_has_the_rho_of_its_dequantised_weights(tmp_path, capsys, quantization):
    theirs = write_with_transformers(tmp_path / "m", "default", tied=False)
    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "m")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in INSTRUCTIONS))
    out = tmp_path / "f.json"
    options = ["--data", str(tmp_path / "rows.jsonl"), "--sequences", "2", "--length", "200", "--device", "cpu"]
    options += ["--json", str(out)]
    main([str(tmp_path / "m"), *options, "--quantization", quantization])
    printed = capsys.readouterr().out
    assert "rho: 2 rows of instructions, of up to " in printed
    figures = json.loads(out.read_text())
    assert (figures["rows"], figures["quantization"]) == ("instructions", quantization)

    base = Base(quantization=quantization, dtype="float32")
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "_proj" in name:
                weight.copy_(dequantize(weight, base))
    theirs.save_pretrained(tmp_path / "plain")
    rows = read_rows(tmp_path / "rows.jsonl", BytesTokenizer(), 200, 2, 64, 300)
    baseline, rho = rope_influence(decoder_of(tmp_path / "plain"), rows, 2.0)
    # Products with 8 bits round the inputs, too.
    assert figures["baseline_loss"] == pytest.approx(baseline, rel=1e-3 if quantization == "int8" else 1e-5)
    if quantization != "int8":
        assert figures["rho"] == pytest.approx(rho, abs=1e-5)
    assert min(map(abs, rho)) > 1e-5
    with pytest.raises(SystemExit):
        main([str(tmp_path / "m"), *options, "--quantization", quantization, "--dtype", "float16"])
    assert "--quantization needs --dtype float32 or bfloat16" in capsys.readouterr().err
    n_layers = theirs.config.num_hidden_layers
    with pytest.raises(SystemExit):
        main([str(tmp_path / "m"), *options, "--top", str(n_layers + 1)])
    assert f"has {n_layers} layers; set 1 to {n_layers}." in capsys.readouterr().err


@pytest.mark.parametrize("rotates", [[True, True, False], [True, False, False], [False] * 3])
def test_pictures_of_models_with_layers_that_do_not_rotate(tmp_path, rotates):
    delta, rho = [0.1, 0.2, 0.3], [0.01 * layer - 0.005 if turns else 0.0 for layer, turns in enumerate(rotates)]
    figures = {"delta": delta, "rho": rho, "rotates": rotates, **compare(delta, rho, rotates, 1)}
    draw(figures, tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert ("<!-- no layer rotates -->" in drawn) is not any(rotates)
    assert ("<!-- linear fit -->" in drawn) is (sum(rotates) > 1)


def test_a_sequences_mean_does_not_depend_on_chunks(tmp_path):
    write_with_transformers(tmp_path / "m", "default", tied=True)
    whole, pieces = (layer_means(decoder_of(tmp_path / "m", chunk), TOKENS[0]) for chunk in (64, 5))
    assert_close(whole, pieces, atol=1e-6, rtol=0)


def test_own_pairs():
    pairs = read_pairs(OWN_PAIRS)
    assert [pair.domain for pair in pairs] == ["code"] * 5 + ["knowledge"] * 5 + ["maths"] * 5
    for pair in pairs:
        shorter = min(len(pair.correct), len(pair.wrong))
        start = next(i for i in range(shorter) if pair.correct[i] != pair.wrong[i])
        end = next(i for i in range(shorter) if pair.correct[-1 - i] != pair.wrong[-1 - i])
        assert len(pair.correct) - start - end <= 8, pair  # one word or number apart


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"domain": "a", "correct": "x", "wrong": "y"}\n{"domain": "a", "correct": "x"}', 'line 2: .*"wrong"'),
        ('{"correct": "x", "wrong": "y"}', 'line 1: .*"domain"'),
        ('{"domain": "a", "correct": 5, "wrong": "y"}', 'line 1: .*"correct"'),
        ('\n{"domain": "a", "correct": "", "wrong": "y"}', 'line 2: "correct" is empty'),
        ('{"domain": "a", "correct": "x", "wrong": "x"}', 'line 1: "wrong" is the same'),
        ("nonsense", 'line 1: .*"domain"'),
        ("", "contains no pairs"),
    ],
)
def test_pairs_that_are_none_name_line_and_field(content, said, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_pairs(tmp_path / "pairs.jsonl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "model directory, or --profile"),
        (["m"], "--data FILE is needed"),
        (["m", "--data", "x", "--gamma", "1"], "--gamma 1 leaves RoPE's base"),
        (["m", "--data", "x", "--out", "/dev/null/p.json"], "/dev/null/p.json: its folder can't be made"),
        (["--profile", str(TABLE_7), "--pairs", "x"], "--pairs is for measuring"),
        (["m", "--profile", str(TABLE_7)], "model directory, or --profile"),
        (["--profile", str(TABLE_7), "--top", "33"], f"--top 33: {TABLE_7} has 32 layers; set 1 to 32."),
    ],
)
def test_options_that_do_not_go_together(options, said, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"delta": [1, 2]}', '"rho" must be a list'),
        ('{"delta": [1, 2], "rho": [1]}', '"delta" has 2 layers and "rho" 1'),
        ('{"delta": [1, NaN], "rho": [1, 2]}', '"delta" must be a list'),
        ('{"delta": [1], "rho": [2], "rotates": [1]}', '"rotates" must be true or false'),
        ("[", "not a JSON file"),
    ],
)
def test_profiles_that_are_none(content, said, tmp_path):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(SystemExit, match=said):
        main(["--profile", str(tmp_path / "p.json")])
