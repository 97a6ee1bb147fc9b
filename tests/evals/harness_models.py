"""Models, texts and requests for the tests of lm-evaluation-harness."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Position, Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer, load_tokenizer_dir
from farsight.evals.harness.model import HarnessModel, Reading
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from tests.model.test_model import SMALL

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

WORDS = [
    "the",
    "a",
    "of",
    "red",
    "blue",
    "seven",
    "river",
    "stone",
    "walks",
    "sings",
    "quickly",
    "under",
    "not",
    "because",
]


def ascii_model(config: ModelConfig, std: float) -> Llama:
    """A model of random weights that writes ASCII, since random bytes would not be valid text."""
    model = build_model(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std, generator=generator)
        model.output.weight[127:] = 0
    return model


def make_model(folder: Path, position: Position | None = None, template: str | None = None) -> Path:
    """A directory of an `ascii_model`."""
    tokenizer = load_tokenizer(Tokenizer(kind="bytes"))
    tokenizer.chat_template = template
    tokenizer.save(folder / "tokenizer")
    config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), position or Position(), trained_length=96)
    model = ascii_model(config, std=0.15)
    write_model_dir(folder / "model", config, model.state_dict(), tokenizer_dir=folder / "tokenizer")
    return folder / "model"


def ours(path: Path, **reading) -> HarnessModel:
    model, config = load_model(path)
    loaded = LoadedModel(path, Decoder(model, config, chunk=32), load_tokenizer_dir(path), config.trained_length)
    return HarnessModel(loaded, Reading(**{"max_length": config.trained_length, "rows_at_once": 3, **reading}))


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]
