"""`farsight serve`: which rows are read together, what is refused, and how answers and the server end."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from farsight.configs.schema import DynamicNtkRope
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder, Rows
from farsight.inference.sampling import Sampling
from farsight.inference.serve import app
from farsight.inference.serve import run as run_module
from farsight.inference.serve.__main__ import main as serve_main
from farsight.inference.serve.engine import Engine, Row
from farsight.inference.serve.run import _serve, describe
from tests.inference.served import Client, serving, small_model, write

TEXTS = ["red stone", "a river of seven", "the blue under", "x", "because it walks quickly, not", "so"]


@pytest.fixture(scope="module")
def loaded():
    return small_model()


@pytest.fixture(scope="module")
def client(loaded):
    with serving(loaded) as client:
        yield client


@pytest.fixture
def open_gate():
    """Decoders wait for it before they start a batch."""
    gate = threading.Event()
    gate.set()
    return gate


@pytest.fixture
def batches(monkeypatch, open_gate):
    """The lengths of the prompts in each batch that decoders start."""
    lengths, start = [], Decoder.start

    def started(self, batch, new_tokens=0):
        lengths.append(list(batch))
        assert open_gate.wait(30)
        return start(self, batch, new_tokens)

    monkeypatch.setattr(Decoder, "start", started)
    return lengths


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 30 seconds")


def test_concurrent_requests_equal_sequential_ones(client, batches, open_gate):
    """Prompts and settings that differ; those that draw alike are read together, while the first holds up the others."""
    settings = [{}, {}, {"temperature": 1.2, "seed": 3}, {"max_tokens": 5}, {}, {"temperature": 1.2, "seed": 8}]
    bodies = [{"max_tokens": 9, **more} for more in settings]
    one_by_one = [client.complete(t, **b)["choices"] for t, b in zip(TEXTS, bodies, strict=True)]
    assert batches == [[len(text) + 1] for text in TEXTS]
    batches.clear()
    open_gate.clear()
    with ThreadPoolExecutor(6) as pool:
        together = [pool.submit(client.complete, TEXTS[0], **bodies[0])]
        until(lambda: batches)
        together += [pool.submit(client.complete, t, **b) for t, b in zip(TEXTS[1:], bodies[1:], strict=True)]
        until(lambda: len(client.engine._waiting) == 5)
        open_gate.set()
    assert [answer.result()["choices"] for answer in together] == one_by_one
    assert {frozenset(batch) for batch in batches} == {frozenset({10}), frozenset({17, 2, 30}), frozenset({15, 3})}


def rows_that_wait(loaded, engine_rows, asked):
    """The batches that rows with these prompt lengths and numbers of new tokens are answered in, and their answers."""
    engine = Engine(loaded.decoder, loaded.tokenizer, engine_rows, 32)
    done, texts = threading.Semaphore(0), [""] * len(asked)

    def deliver_to(number):
        def deliver(piece):
            assert piece.error is None
            texts[number] += piece.text
            if piece.ended:
                done.release()

        return deliver

    rows = [
        Row(list(range(40, 40 + n)), new, Sampling(temperature, seed=1), deliver_to(i))
        for i, (n, new, temperature) in enumerate(asked)
    ]
    engine.submit(rows)
    for _ in rows:
        assert done.acquire(timeout=30)
    engine.close()
    return texts


def test_only_rows_that_come_out_as_alone_are_put_together(loaded, batches):
    asked = [(5, 6, 0.0), (9, 4, 0.0), (7, 6, 0.8), (3, 6, 0.8), (20, 6, 0.0)]
    rows_that_wait(loaded, 2, asked)
    assert batches == [[5, 9], [7, 3], [20]]

    # Beyond 32 tokens, dynamic NTK turns by the length that a row may reach.
    batches.clear()
    dynamic = small_model(trained=32, rotary=DynamicNtkRope(factor=2.0, original_length=32))
    asked = [(5, 6, 0.0), (20, 12, 0.0), (30, 6, 0.0), (4, 28, 0.0)]
    together = rows_that_wait(dynamic, 4, asked)
    assert batches == [[5, 20], [30], [4]]  # 20 + 28 would be 48
    assert together == [text for row in asked for text in rows_that_wait(dynamic, 1, [row])]

    # An extension that places tokens by that length has one number of new tokens for a batch.
    batches.clear()
    extended = small_model("self_extend:group=4,window=8", trained=32)
    asked = [(30, 20, 0.0), (40, 20, 0.0), (40, 9, 0.0)]
    together = rows_that_wait(extended, 4, asked)
    assert batches == [[30, 40], [40]]
    assert together == [text for row in asked for text in rows_that_wait(extended, 1, [row])]


BAD = {
    "no prompt": (
        {"prompt": None},
        400,
        "prompt is missing: send a string or token ids; conversations go to /v1/chat/completions",
    ),
    "mixed": ({"prompt": ["x", 3]}, 400, "prompt is ['x', 3]"),
    "empty": ({"prompt": []}, 400, "prompt is []"),
    "token": ({"prompt": [1, 258]}, 400, "prompt has the token 258; the tokenizer has the tokens 0 to 257"),
    "long": (
        {"prompt": "x" * 90},
        400,
        "maximum context length is 96 tokens (--max-length), and you asked for 107: 91",
    ),
    "more": ({"max_tokens": 500}, 400, "max_tokens is 500; it must be from 0 to 96 (--max-length)"),
    "nothing": ({"max_tokens": 0}, 400, "asks for nothing"),
    "text": ({"max_tokens": "5"}, 400, "max_tokens is '5'; it must be a whole number"),
    "cold": ({"temperature": -1}, 400, "temperature is -1.0: set 0 for greedy"),
    "nucleus": ({"top_p": 0}, 400, "top_p is 0.0: set a share of 1"),
    "unknown": (
        {"temprature": 0},
        400,
        "temprature is not a field that this server knows. Did you mean 'temperature'?",
    ),
    "penalty": (
        {"frequency_penalty": 0.5},
        400,
        "frequency_penalty = 0.5 is not supported; leave frequency_penalty out",
    ),
    "best": ({"n": 1, "best_of": 2}, 400, "best_of = 2 is not supported"),
    "stop": ({"stop": [1]}, 400, "stop is [1]; it must be a string or a list of strings"),
    "stop nothing": ({"stop": ["a", ""]}, 400, "stop is ['a', '']"),
    "many": ({"n": 33}, 400, "n is 33; it must be from 1 to 32 (--queue)"),
    "seed": ({"seed": 2**70}, 400, "seed is 1180591620717411303424; it must be from -9,223,372,036,854,775,808 to"),
    "far": ({"zzzz": 1}, 400, "zzzz is not a field that this server knows. Known: echo, "),
    "stream": ({"stream": "yes"}, 400, "stream is 'yes'; it must be true or false"),
    "tops": ({"logprobs": 50}, 400, "logprobs is 50; it must be from 0 to 20"),
    "choices": (
        {"prompt": ["x"] * 20, "n": 2},
        400,
        "40 answers were asked for at once; this server queues 32 (--queue)",
    ),
    "model": ({"model": "gpt"}, 404, "There is no model 'gpt' here; this server has 'small'"),
    "surrogate": ({"prompt": "\ud800"}, 400, ""),
    "list": ([], 400, "The request is []; it must be a JSON object"),
    "JSON": (b"{", 400, "The request is not JSON"),
    "deep": (b"[" * 200_000, 400, "The request is not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_explained(client, case):
    body, status, message = BAD[case]
    if case == "surrogate":  # bytes spell half of a pair too
        client("/v1/completions", {"prompt": "\ud800", "max_tokens": 1})
        return
    body = {"prompt": "x", **body} if isinstance(body, dict) else body
    error = client("/v1/completions", body, status)["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    if case == "long":
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


BAD_CHATS = {
    "none": ({"messages": []}, "messages is []; it must be a list of one or more messages"),
    "missing": ({"messages": None}, "messages is missing: send a list of messages; prompts go to /v1/completions"),
    "lengths": ({"max_completion_tokens": 3}, "max_completion_tokens is 3 and max_tokens is 2; send one of them"),
    "role": ({"messages": [{"content": "x"}]}, "messages[0] is {'content': 'x'}; it must have a \"role\""),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content is"),
    "call": ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls is not"),
    "forged": (
        {"messages": [{"role": "user", "content": "<|eos|>"}]},
        "messages can't be used: a message holds the special token <|eos|>",
    ),
    "tops": ({"top_logprobs": 2}, "top_logprobs is set without logprobs: true"),
    "tools": ({"tools": [{}]}, "tools = [{}] is not supported"),
    "echo": ({"echo": True}, "echo is not a field"),
}


@pytest.mark.parametrize("case", BAD_CHATS)
def test_bad_conversations_are_explained(client, case):
    body, message = BAD_CHATS[case]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **body}
    assert message in client("/v1/chat/completions", body, 400)["error"]["message"]


def test_neutral_settings_are_taken_and_other_routes_are_not_there(client):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 2, "n": 2, "user": "me"}
    assert client.complete("x", model="small", max_tokens=1, suffix=None, **neutral)["model"] == "small"
    assert client("/health") == {"status": "ok"}
    (model,) = client("/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("small", 96)
    assert client("/v1/models/small") == model
    assert "no model 'other'" in client("/v1/models/other", status=404)["error"]["message"]
    routes = " This server has GET /health, GET /v1/models, GET /v1/models/{name}, POST /v1/completions, POST /v1/chat/completions."
    assert client("/v1/nothing", status=404)["error"]["message"] == f"GET /v1/nothing: Not Found.{routes}"
    assert client("/health", {}, status=405)["error"]["message"] == f"POST /health: Method Not Allowed.{routes}"


def test_a_model_without_a_template_takes_no_conversations():
    with serving(small_model(template=None), largest_request=2000) as client:
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert "small has no chat template" in client("/v1/chat/completions", body, 400)["error"]["message"]
        long = {"prompt": "x" * 3000}
        assert "more than 2,000 bytes" in client("/v1/completions", long, 413)["error"]["message"]


def opened(client, body):
    """A socket with a request on its way."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", client.port), timeout=30)
    connection.sendall(head.encode() + raw)
    return connection


def test_a_full_queue_refuses_and_departed_clients_cost_nothing(monkeypatch):
    """One long answer runs, two wait, the next is refused; when the clients go, decoding stops long before its end."""
    reads, read = [0], Rows.read

    def counted(self, tokens_BL):
        reads[0] += 1
        return read(self, tokens_BL)

    monkeypatch.setattr(Rows, "read", counted)
    other = small_model(trained=60_000)
    other.tokenizer.eos_id = None
    body = {"prompt": "x", "temperature": 0, "max_tokens": 50_000}
    with serving(other, rows=1, queue=2) as client:
        clients = [opened(client, {**body, "stream": True})]
        assert clients[0].recv(12) == b"HTTP/1.1 200"
        clients += [opened(client, body), opened(client, {**body, "stream": True})]
        until(lambda: len(client.engine._waiting) == 2)
        refused = client.send("POST", "/v1/completions", body)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        error = json.loads(refused.read())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "2 answers are waited for and 1 more were asked for; this server queues 2 (--queue)" in error["message"]
        for connection in clients:
            connection.close()
        until(lambda: not client.engine._running and not client.engine._waiting)
        assert client.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert reads[0] < 25_000


def test_a_fault_is_answered_and_the_next_request_served(capsys):
    other = small_model()
    weight = other.decoder.model.norm.weight
    kept = weight.detach().clone()
    with serving(other) as client:
        with torch.no_grad():
            weight[3] = torch.nan
        body = {"prompt": "x", "max_tokens": 3}
        error = client("/v1/completions", body, 500)["error"]
        assert error["type"] == "server_error"
        assert "its tensor model.norm.weight" in error["message"]
        assert client("/v1/completions", {**body, "stream": True}, 500)["error"] == error
        with torch.no_grad():
            weight.copy_(kept)
        assert client.complete("x", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert error["message"] in capsys.readouterr().err


def test_an_unexpected_error_is_answered_too(client, monkeypatch, capsys):
    monkeypatch.setattr(app, "read_chat", lambda body, served: 1 / 0)
    error = client("/v1/chat/completions", {}, 500)["error"]
    assert error["message"].startswith("unexpected ZeroDivisionError: a fault in Farsight")
    assert "1 / 0" in capsys.readouterr().err


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_lets_answers_finish_and_a_second_ends_them(signals, capsys):
    """SIGTERM while an answer is written: it is completed or given up, the port closes, and the server returns."""
    tokens = {1: 300, 2: 50_000}[signals]
    other = small_model(trained=60_000)
    other.tokenizer.eos_id = None
    engine, found = Engine(other.decoder, other.tokenizer, 2, 4), {}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client, said = Client(port, engine), [""]

    def says(words):
        said[0] += capsys.readouterr().err
        return words in said[0]

    def ask():
        until(lambda: says("answers at"))
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x", "temperature": 0, "max_tokens": tokens}
            answer = pool.submit(client, "/v1/completions", body, {1: 200, 2: 500}[signals])
            try:
                until(lambda: engine._running)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: says("running answers are completed"))
            if signals == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            found.update(answer.result())

    thread = threading.Thread(target=ask)
    thread.start()
    asyncio.run(_serve(engine, describe(other, None, None, 4), "127.0.0.1", port))
    thread.join()
    if signals == 1:
        assert found["usage"]["completion_tokens"] == 300
    else:
        assert found["error"]["message"] == "the server was stopped before the answer was complete"
    with pytest.raises(ConnectionError):
        client("/health")
    assert not engine.alive


def test_a_port_in_use_is_named(loaded):
    engine = Engine(loaded.decoder, loaded.tokenizer, 2, 4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: .*in use. --port 0 takes a free port"):
            asyncio.run(_serve(engine, describe(loaded, None, None, 4), "127.0.0.1", port))
    assert not engine.alive


def test_a_longer_context_than_trained_is_warned_of(tmp_path, monkeypatch, capsys):
    """As farsight generate does for a prompt; with an extension nothing is said."""
    monkeypatch.setattr(run_module, "_serve", lambda *_: _ended())
    folder = str(write(small_model(), tmp_path))
    for more, warned in ((["--max-length", "1000"], True), (["--max-length", "96"], False), ([], False),
                         (["--max-length", "1000", "--extend", "yarn:4"], False)):  # fmt: skip
        serve_main([folder, "--device", "cpu", *more])
        said = "--max-length is 1,000, and " in (found := capsys.readouterr().err)
        assert said == warned, found
        assert (
            "was trained on sequences of 96: expect worse text past that length, or set --extend" in found
        ) == warned


async def _ended():
    return None
