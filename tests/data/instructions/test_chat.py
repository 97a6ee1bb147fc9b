"""Conversations and chat templates: rows of every format, the same tokens as transformers, and the right tokens trained."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from farsight.configs.finetuning import InstructionData
from farsight.data.instructions.chat import LLAMA_3, ChatTemplate, chat_template
from farsight.data.instructions.conversations import Conversation, UnusableRow, to_conversation
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer_dir, train_sentencepiece
from farsight.errors import DataError

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Trims, has a default system prompt, refuses turns out of order, and writes tool calls as JSON.
CAREFUL = """\
{{- bos_token }}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'You are kind.' %}
{%- endif %}
{{- '<|start|>system\\n' + system + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('No ' + message.role) }}{% endif %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- call | tojson }}
        {%- if not loop.last %}{% continue %}{% endif %}
    {%- endfor %}
    {{- (message.content or '') | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""

MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
"""

LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OWN_TOKENS = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
TEXT = (
    "Hello there, how are you? I am very well, thank you.\n\nassistant user system You are kind. 日本語 🙂 def f(x):\n"
)

TURNS = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Hello there 🙂"},
    {"role": "assistant", "content": "  I am well:\n\n  日本語 "},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "Bye"},
]


def make_tokenizer(directory: Path, specials: list[str], template: str | None, bos: str | None, eos: str) -> Path:
    """A byte-level BPE tokenizer as transformers stores it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=340, initial_alphabet=letters))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "llama3": make_tokenizer(root / "llama3", LLAMA_TOKENS, LLAMA_3, LLAMA_TOKENS[0], LLAMA_TOKENS[1]),
        "chatml": make_tokenizer(root / "chatml", CHATML_TOKENS, CHATML, None, CHATML_TOKENS[0]),
        "careful": make_tokenizer(root / "careful", OWN_TOKENS, CAREFUL, OWN_TOKENS[0], OWN_TOKENS[1]),
        "marked": make_tokenizer(root / "marked", OWN_TOKENS, MARKED, OWN_TOKENS[0], OWN_TOKENS[1]),
        "none": make_tokenizer(root / "none", LLAMA_TOKENS, None, LLAMA_TOKENS[0], LLAMA_TOKENS[1]),
    }


def encode(directory: Path, messages: list[dict], train_on: str = "assistant", data: InstructionData | None = None):
    """Returns (tokenizer, tokens) of a conversation."""
    tokenizer = load_tokenizer_dir(directory)
    template = chat_template(data or InstructionData(), tokenizer)
    marked = template.mark(to_conversation({"messages": messages}, "messages"), train_on)
    return tokenizer, template.encode([marked])[0]


def trained_pieces(directory: Path, tokens) -> list[str]:
    """The text of each run of trained tokens, special tokens included."""
    reference = AutoTokenizer.from_pretrained(directory)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens.trained, [False]]).astype(int)))
    return [reference.decode(tokens.ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


class TestTokens:
    @pytest.mark.parametrize("name", ["llama3", "chatml", "careful", "marked"])
    @pytest.mark.parametrize("turns", [slice(0, 5), slice(1, 3), slice(0, 3)])
    def test_are_those_of_transformers(self, tokenizers, name, turns):
        reference = AutoTokenizer.from_pretrained(tokenizers[name])
        expected = reference.apply_chat_template(TURNS[turns], tokenize=True, return_dict=False)
        _, tokens = encode(tokenizers[name], TURNS[turns])
        assert tokens.ids.tolist() == expected

    def test_tool_calls_and_schemas_reach_the_template(self, tokenizers):
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
        messages = [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two."},
        ]
        reference = AutoTokenizer.from_pretrained(tokenizers["careful"])
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        _, tokens = encode(tokenizers["careful"], messages)
        assert tokens.ids.tolist() == expected
        first, last = trained_pieces(tokenizers["careful"], tokens)
        assert first == json.dumps(call, ensure_ascii=False) + "<|end|>"
        assert last == "Two.<|end|>"

    def test_of_a_sentencepiece_model_are_those_of_its_exported_directory(self, tmp_path):
        """Its tokenizer has no special tokens for turns: the template's markers are text, and eos ends the last turn."""
        train_sentencepiece([TEXT * 40], 320, tmp_path)
        tokenizer, tokens = encode(tmp_path, TURNS)
        chat_template(InstructionData(), tokenizer).save(tmp_path)
        expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TURNS, return_dict=False)
        assert tokens.ids.tolist() == [*expected, tokenizer.eos_id]
        assert trained_pieces(tmp_path, tokens) == ["I am well:\n\n  日本語<|eot_id|>", "Bye<|eot_id|><|eos|>"]

    def test_of_bytes(self):
        tokenizer = BytesTokenizer()
        template = chat_template(InstructionData(), tokenizer)
        marked = template.mark(Conversation(tuple(TURNS), (None,) * 5), "assistant")
        tokens = template.encode([marked])[0]
        assert tokens.ids.tolist() == [256, *marked.text.removeprefix("<|bos|>").encode(), 257]
        trained = tokens.ids[tokens.trained].tolist()
        assert trained == [*"I am well:\n\n  日本語<|eot_id|>Bye<|eot_id|>".encode(), 257]

    def test_text_is_bos_text_eos_and_all_trained(self, tokenizers):
        tokenizer = load_tokenizer_dir(tokenizers["llama3"])
        template = chat_template(InstructionData(), tokenizer)
        text = "Once <|eot_id|> upon 日本"
        tokens = template.encode([template.mark(Conversation(text=text), "assistant")])[0]
        assert tokens.ids.tolist() == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        assert tokens.trained.all()
        assert tokenizer.special_tokens["<|eot_id|>"] not in tokens.ids

    def test_the_date_does_not_change_from_day_to_day(self, tokenizers, tmp_path):
        shutil.copytree(tokenizers["careful"], tmp_path / "dated")
        (tmp_path / "dated" / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CAREFUL)
        tokenizer, tokens = encode(tmp_path / "dated", TURNS)
        assert tokenizer.decode(tokens.ids.tolist()).startswith("26 Jul 2024")


class TestTemplate:
    def test_a_file_wins_over_the_tokenizers_own_and_llama_3_is_the_last(self, tokenizers, tmp_path):
        own = tmp_path / "own.jinja"
        own.write_text("{{ messages[0].content }}!")
        tokenizer = load_tokenizer_dir(tokenizers["chatml"])
        assert chat_template(InstructionData(chat_template=str(own)), tokenizer).source == "{{ messages[0].content }}!"
        assert chat_template(InstructionData(), tokenizer).source == CHATML
        assert chat_template(InstructionData(), load_tokenizer_dir(tokenizers["none"])).source == LLAMA_3

    @pytest.mark.parametrize("named", [False, True])
    def test_in_tokenizer_config(self, tokenizers, tmp_path, named):
        directory = shutil.copytree(tokenizers["none"], tmp_path / "t")
        config = json.loads((directory / "tokenizer_config.json").read_text())
        templates = [{"name": "other", "template": "no"}, {"name": "default", "template": LLAMA_3}]
        config["chat_template"] = templates if named else LLAMA_3
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(TURNS, return_dict=False)
        assert encode(directory, TURNS)[1].ids.tolist() == expected

    @pytest.mark.parametrize("kind", ["sentencepiece", "bytes", "huggingface"])
    def test_saved_beside_a_tokenizer_it_stays_with_it(self, tokenizers, tmp_path, kind):
        if kind == "sentencepiece":
            train_sentencepiece([TEXT * 40], 320, tmp_path / "a")
        elif kind == "bytes":
            BytesTokenizer().save(tmp_path / "a")
        else:
            shutil.copytree(tokenizers["none"], tmp_path / "a")
        assert load_tokenizer_dir(tmp_path / "a").chat_template is None
        ChatTemplate(CHATML, "test", BytesTokenizer()).save(tmp_path / "a")
        load_tokenizer_dir(tmp_path / "a").save(tmp_path / "b")
        assert load_tokenizer_dir(tmp_path / "b").chat_template == CHATML
        assert (
            AutoTokenizer.from_pretrained(tmp_path / "b")
            .apply_chat_template(TURNS[1:2], tokenize=False)
            .startswith("<|im_start|>user\nHello there")
        )

    def test_a_broken_one_is_named(self, tokenizers, tmp_path):
        tokenizer = load_tokenizer_dir(tokenizers["none"])
        (tmp_path / "bad.jinja").write_text("{% for %}")
        with pytest.raises(DataError, match=r"bad\.jinja: not a Jinja template"):
            chat_template(InstructionData(chat_template=str(tmp_path / "bad.jinja")), tokenizer)
        with pytest.raises(DataError, match=r"data\.chat_template = nowhere: it can't be read"):
            chat_template(InstructionData(chat_template="nowhere"), tokenizer)

    def test_it_runs_in_a_sandbox(self, tokenizers):
        template = ChatTemplate("{{ messages.__class__.__mro__ }}", "evil", load_tokenizer_dir(tokenizers["none"]))
        with pytest.raises(UnusableRow, match="unsafe"):
            template.mark(Conversation(tuple(TURNS), (None,) * 5), "all")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("source", "why"),
        [
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 3 seconds"),
            ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "3 seconds"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
            ("{{ 'a' * 10**10 }}", "more than 1,024 MiB"),
            ("{{ messages[0].role.center(10**10) }}", "more than 1,024 MiB"),
            ("{{ '%10000000000d' % 1 }}", "more than 1,024 MiB"),
            ("{% for i in range(90000) %}{{ 'x' * 9000 }}{% endfor %}", "writes more than 67,108,864 characters"),
            (
                "{% set n = namespace(a=['x']) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
                "more than",
            ),
            ("{% if a %}" * 3000 + "{% endif %}" * 3000, "nested too deeply"),
        ],
    )
    def test_one_that_explodes_is_named(self, source, why):
        """The system's limits end the process."""
        start = time.monotonic()
        with pytest.raises(DataError, match=rf"evil: the chat template .*{why}.*set data\.chat_template"):
            ChatTemplate(source, "evil", BytesTokenizer()).mark(Conversation(tuple(TURNS), (None,) * 5), "all")
        assert time.monotonic() - start < 60  # CPU seconds are limited, not seconds of a shared machine
        assert not [child for child in command_lines_of_children() if "template_process" in child]

    @pytest.mark.parametrize(
        "source", ["{% for i in range(10**9) %}{% endfor %}", "{{ nope() }}", "{% include 'x' %}", "{{ 1 < 'x' }}"]
    )
    def test_one_that_fails_is_named(self, source):
        template = ChatTemplate(source, "evil", BytesTokenizer())
        for _ in range(2):
            with pytest.raises(UnusableRow, match="refused by the chat template: evil: "):
                template.mark(Conversation(tuple(TURNS), (None,) * 5), "all")

    def test_after_one_conversation_too_many_others_go_on(self):
        source = "{% if messages|length == 1 %}{{ 'a' * 10**10 }}{% endif %}fine"
        template = ChatTemplate(source.replace("10**10", "(messages|length * 10**10)"), "odd", BytesTokenizer())
        with pytest.raises(DataError, match=r"odd: .* MiB"):
            template.mark(Conversation(tuple(TURNS[:1]), (None,)), "all")
        assert template.mark(Conversation(tuple(TURNS[:2]), (None, None)), "all").text == "fine"


def command_lines_of_children() -> list[str]:
    """Command lines of this process's children."""
    children = Path("/proc/self/task").glob("*/children")
    found = [Path(f"/proc/{child}/cmdline") for path in children for child in path.read_text().split()]
    return [path.read_text() for path in found]


class TestTrained:
    """Expected texts are written out by hand from the templates above."""

    @pytest.mark.parametrize(
        ("name", "first", "last"),
        [
            ("llama3", "I am well:\n\n  日本語<|eot_id|>", "Bye<|eot_id|>"),
            ("chatml", "  I am well:\n\n  日本語 <|im_end|>", "Bye<|im_end|>"),
            ("careful", "I am well:\n\n  日本語<|end|>", "Bye<|end|>"),
            ("marked", "  I am well:\n\n  日本語 <|end|>", "Bye<|end|>"),
        ],
    )
    def test_is_what_the_assistant_says_and_its_end_of_turn(self, tokenizers, name, first, last):
        assert trained_pieces(tokenizers[name], encode(tokenizers[name], TURNS)[1]) == [first, last]

    @pytest.mark.parametrize("turns", [TURNS, TURNS[1:3], TURNS[1:]])
    def test_generation_blocks_give_the_mask_of_transformers(self, tokenizers, turns):
        reference = AutoTokenizer.from_pretrained(tokenizers["marked"])
        expected = reference.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        _, tokens = encode(tokenizers["marked"], turns)
        assert tokens.ids.tolist() == expected["input_ids"]
        assert tokens.trained.astype(int).tolist() == expected["assistant_masks"]

    @pytest.mark.parametrize("name", ["llama3", "marked"])
    @pytest.mark.parametrize("mark", [{"train": True}, {"weight": 1}])
    def test_a_turns_own_mark_wins(self, tokenizers, name, mark):
        key = next(iter(mark))
        turns = [dict(turn) for turn in TURNS]
        turns[1] |= mark
        turns[2] |= {key: False if key == "train" else 0}
        end = "<|eot_id|>" if name == "llama3" else "<|end|>"
        _, tokens = encode(tokenizers[name], turns)
        assert trained_pieces(tokenizers[name], tokens) == [f"Hello there 🙂{end}", f"Bye{end}"]

    @pytest.mark.parametrize("name", ["llama3", "chatml"])
    def test_a_short_text_is_not_looked_for_in_the_header(self, tokenizers, name):
        messages = [{"role": "user", "content": "user", "train": True}, {"role": "assistant", "content": "e"}]
        _, tokens = encode(tokenizers[name], messages)
        end = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}[name]
        assert trained_pieces(tokenizers[name], tokens) == [f"user{end}", f"e{end}"]

    def test_llama_3s_template_refuses_tool_calls(self, tokenizers):
        call = {"type": "function", "function": {"name": "add", "arguments": {}}}
        messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        with pytest.raises(UnusableRow, match=r"data\.chat_template"):
            encode(tokenizers["none"], messages)

    def test_all(self, tokenizers):
        _, tokens = encode(tokenizers["careful"], TURNS, "all")
        assert tokens.trained.all()
        turns = [*TURNS[:3], TURNS[3] | {"train": False}, TURNS[4]]
        _, tokens = encode(tokenizers["careful"], turns, "all")
        reference = AutoTokenizer.from_pretrained(tokenizers["careful"])
        assert reference.decode(tokens.ids[~tokens.trained].tolist()) == "<|start|>user\n<|end|>"

    def test_eos_closes_a_template_that_does_not(self, tokenizers, tmp_path):
        path = tmp_path / "plain.jinja"
        path.write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        tokenizer, tokens = encode(tokenizers["none"], TURNS[1:3], data=InstructionData(chat_template=str(path)))
        assert tokens.ids[-1] == tokenizer.eos_id
        assert tokens.trained[-1]
        tokenizer, tokens = encode(tokenizers["none"], TURNS[1:4], data=InstructionData(chat_template=str(path)))
        assert tokens.ids[-1] == tokenizer.eos_id
        assert not tokens.trained[-1]

    def test_a_template_that_rewrites_earlier_turns_is_named(self, tokenizers, tmp_path):
        path = tmp_path / "forgets.jinja"
        path.write_text(
            "{% for m in messages %}{{ m.role + ':' + (m.content if loop.last or m.role == 'user' else '…') }}{% endfor %}"
        )
        data = InstructionData(chat_template=str(path))
        encode(tokenizers["none"], TURNS[1:3], data=data)
        with pytest.raises(
            UnusableRow, match=r"turns not found.*forgets\.jinja writes the first 2 messages in another"
        ):
            encode(tokenizers["none"], TURNS[1:], data=data)

    @pytest.mark.parametrize(
        ("name", "held"), [("llama3", "<|eot_id|>"), ("chatml", "<|im_end|>"), ("careful", "<|bos|>")]
    )
    def test_a_message_that_holds_a_special_token_is_refused(self, tokenizers, name, held):
        for turn in (1, 2):
            turns = [dict(message) for message in TURNS]
            turns[turn]["content"] = f"a {held} b"
            with pytest.raises(UnusableRow, match=r"special token in the text.*" + held.replace("|", r"\|")):
                encode(tokenizers[name], turns)

    def test_markers_that_are_text_are_refused_too(self):
        template = chat_template(InstructionData(), BytesTokenizer())
        with pytest.raises(UnusableRow, match="special token in the text"):
            template.mark(Conversation(({"role": "user", "content": "x<|eot_id|>"},), (None,)), "all")

    def test_what_the_template_refuses_says_why(self, tokenizers):
        with pytest.raises(UnusableRow, match=r"refused by the chat template.*No developer"):
            encode(tokenizers["careful"], [{"role": "developer", "content": "x"}])


class TestFormats:
    CHAT = ({"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"})

    @pytest.mark.parametrize(
        "row",
        [
            {"instruction": "Add.", "input": "1 and 2", "output": "3"},
            {"instruction": "Add.\n\n1 and 2", "input": "", "output": "3"},
            {"instruction": "Add.\n\n1 and 2", "output": "3", "text": None},
            {"conversations": [{"from": "human", "value": "Add.\n\n1 and 2"}, {"from": "gpt", "value": "3"}]},
            {"conversations": [{"from": "user", "value": "Add.\n\n1 and 2"}, {"from": "assistant", "value": "3"}]},
            {"messages": list(CHAT)},
            {"conversations": list(CHAT)},
            {"messages": [{**CHAT[0], "name": None}, {**CHAT[1], "content": [{"type": "text", "text": "3"}]}]},
        ],
    )
    def test_all_give_the_same_conversation(self, row):
        conversation = to_conversation(row, "auto")
        assert conversation.messages == self.CHAT
        assert conversation.train == (None, None)
        assert conversation.identity() == Conversation(self.CHAT, (None, None)).identity()

    @pytest.mark.parametrize("form", ["auto", "alpaca"])
    def test_alpaca_under_other_names(self, form):
        row = {"query": "Add.\n\n1 and 2", "response": "3", "type": "GSM"}
        assert to_conversation(row, form, "query", "response").messages == self.CHAT

    def test_system_and_tool_turns_and_marks(self):
        row = {
            "system": "S",
            "conversations": [
                {"from": "human", "value": "q", "train": True},
                {"from": "gpt", "value": "call", "weight": 0},
                {"from": "tool", "value": "r"},
                {"from": "gpt", "value": "a"},
            ],
        }
        conversation = to_conversation(row, "auto")
        assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert conversation.train == (None, True, False, None, None)

    def test_text(self):
        assert to_conversation({"text": "once"}, "auto") == Conversation(text="once")

    @pytest.mark.parametrize(
        ("row", "form", "reason"),
        [
            ({"prompt": "a", "answer": "b"}, "auto", "no known format: its columns are answer, prompt"),
            ({"instruction": "a"}, "alpaca", "missing field.*no 'output'; there are: instruction"),
            ({"instruction": "a", "output": 3}, "auto", "not a string.*'output' is int"),
            ({"instruction": "a", "output": " "}, "auto", "empty answer"),
            ({"conversations": [{"from": "bot", "value": "x"}]}, "auto", "unknown role.*'bot'"),
            ({"messages": [{"role": "bot", "content": "x"}]}, "auto", "unknown role.*'bot'"),
            ({"messages": []}, "auto", "no messages"),
            ({"messages": "hello"}, "auto", "not a conversation"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "auto", "not text.*image_url"),
            ({"messages": [{"role": "user", "content": "x", "train": "yes"}]}, "auto", "no such.*'yes'"),
            ({"text": ""}, "auto", "no text"),
        ],
    )
    def test_what_is_none_says_why(self, row, form, reason):
        with pytest.raises(UnusableRow, match=reason):
            to_conversation(row, form)

    def test_a_lone_surrogate_is_no_text(self):
        with pytest.raises(UnusableRow, match="not UTF-8"):
            to_conversation({"text": "a\ud800"}, "auto").identity()
