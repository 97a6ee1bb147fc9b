"""engine = "deepspeed": the same losses, weights and checkpoints as with PyTorch's FSDP, and its refusals."""

import shutil
import tomllib

import pytest
import torch
from safetensors.torch import load_file

from farsight.checkpoints.model_dir.names import TensorNames
from farsight.configs.help import help_text
from farsight.configs.load import build_config, load_config
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError
from farsight.parallel.parts import rectangles
from tests.running import contents, metrics, train, train_command

pytest.importorskip("deepspeed")

SHORT = ["--training.steps", "4", "--lr_scheduler.warmup_steps", "1", "--checkpoint.interval", "2"]
ZERO_2 = ["--engine", "deepspeed", "--training.local_batch_size", "2", "--activation_checkpoint.mode", "full"]
# One row a rank: two micro-batches.
ZERO_3 = [
    "--engine", "deepspeed", "--deepspeed.zero_stage", "3", "--training.local_batch_size", "1",
    "--deepspeed.offload_optimizer", "--deepspeed.offload_parameters", "--activation_checkpoint.mode", "selective",
]  # fmt: skip


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed") / "one"
    train(folder, *SHORT)
    return folder


@pytest.fixture(scope="module")
def zero_3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed") / "zero_3"
    done = train(folder, *SHORT, *ZERO_3, ranks=2)
    assert "DeepSpeed" not in done.stdout + done.stderr
    return folder


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def stopped_at_step_2(folder, copy):
    """A copy of a run's folder as if it had been killed while saving its last step."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "model")
    (copy / "checkpoint" / "step-4" / ".metadata").unlink()
    return copy


def assert_same_run(found, expected, tolerance=1e-5):
    for key in ("loss", "grad_norm", "val_loss"):
        rows = list(zip(metrics(found, key), metrics(expected, key), strict=True))
        assert rows
        for a, b in rows:
            assert a[key] == pytest.approx(b[key], rel=tolerance), (key, b["step"])
    a, b = weights(found), weights(expected)
    assert a.keys() == b.keys()
    for name in a:
        # By norm: for weights of 0.02 this allows 2e-6 per element on average. A bound on single elements would not hold on every CPU:
        # Adam divides a gradient by its own size, so an element whose gradient is only rounding noise moves by a part of lr either way.
        assert torch.linalg.vector_norm(a[name] - b[name]) <= 1e-4 * torch.linalg.vector_norm(b[name]), name


def test_zero_3_on_two_ranks_equals_one_process(one_process, zero_3):
    assert_same_run(zero_3, one_process)
    assert [row["tokens"] for row in metrics(zero_3)] == [row["tokens"] for row in metrics(one_process)]


def test_a_zero_3_run_goes_on_bit_for_bit(zero_3, tmp_path):
    copy = stopped_at_step_2(zero_3, tmp_path / "copy")
    train(copy, *SHORT, *ZERO_3, ranks=2)
    assert_same_run(copy, zero_3, tolerance=0)
    a, b = weights(copy), weights(zero_3)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_zero_3_checkpoint_of_two_ranks_is_that_of_one_process_without_it(one_process, zero_3):
    """The same names, shapes and, up to rounding, values: each engine can resume the other's checkpoints."""
    ours, theirs = (contents(folder / "checkpoint" / "step-4") for folder in (zero_3, one_process))
    assert ours.keys() == theirs.keys()
    assert any(name.endswith("exp_avg_sq") for name in ours)
    for name, tensor in ours.items():
        if isinstance(tensor, torch.Tensor):
            # Second moments are far smaller than any fixed bound: compare relative to each tensor's norm.
            a, b = tensor.double(), theirs[name].double()
            assert torch.linalg.vector_norm(a - b) <= 1e-4 * torch.linalg.vector_norm(b), name
        else:
            assert tensor == theirs[name], name


def test_zero_2_goes_on_from_a_checkpoint_of_one_process_without_it(one_process, tmp_path):
    copy = stopped_at_step_2(one_process, tmp_path / "copy")
    train(copy, *SHORT, *ZERO_2, ranks=2)
    assert_same_run(copy, one_process)


def test_weights_of_a_model_directory_stay_when_a_gradient_is_not_finite(one_process, tmp_path, monkeypatch):
    """The loss is finite, so it is DeepSpeed's step that has to leave the weights alone."""
    from farsight.errors import NonFiniteError
    from farsight.training.trainer import Trainer

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    # ZeRO 3 replaces PyTorch's function and does not restore it.
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    start = ["--checkpoint.initial_load_path", str(one_process / "model"), "--engine", "deepspeed"]
    command = train_command(tmp_path / "run", *start, "--deepspeed.zero_stage", "3")
    trainer = Trainer(load_config(command[2:]))
    try:
        trainer.checkpoints.load()
        expected = weights(one_process)

        def assert_unchanged():
            parts = trainer.zero.weights()
            assert {TensorNames().of(name) for name in parts} == expected.keys()
            for name, part in parts.items():
                whole = torch.cat([chunk.flatten() for chunk in part.chunks.values()]).view(part.shape)
                assert torch.equal(whole, expected[TensorNames().of(name)]), name

        assert_unchanged()
        next(trainer.model_parts[0].parameters()).register_hook(lambda gradient: gradient * float("inf"))
        trainer.step += 1
        with pytest.raises(NonFiniteError, match=r"step 1: loss \d.*gradient norm inf"):
            trainer.train_step(trainer.micro_batches())
        assert_unchanged()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shape", [(7,), (5, 4), (1, 6), (6, 1)])
def test_rectangles_hold_exactly_the_elements_of_a_run(shape):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for length in range(numbers.numel() - start + 1):
            found = rectangles(numbers.shape, start, length)
            assert len(found) <= 3
            held = [
                numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
                for offsets, sizes in found
            ]
            assert torch.cat([torch.empty(0, dtype=torch.long), *held]).tolist() == list(range(start, start + length))


def test_the_engine_is_an_option_of_no_section():
    config = load_config(["--engine", "deepspeed", "--deepspeed.zero_stage", "3"])
    assert (config.engine, config.deepspeed.zero_stage) == ("deepspeed", 3)
    assert build_config(tomllib.loads(to_toml(config))) == config
    assert build_config({}).engine == "pytorch"
    assert "--engine" in help_text(["engine"])
    assert "--deepspeed.offload_parameters" in help_text(["deepspeed"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"engin": "deepspeed"}, "Did you mean 'engine'"),
        ({"engine": "deepsped"}, "Did you mean 'deepspeed'"),
        ({"deepspeed": {"zero_stage": 3}}, 'set engine = "deepspeed" too'),
        ({"parallelism": {"tensor_parallel_degree": 2}}, "tensor_parallel_degree = 2"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "pipeline_parallel_degree = 2"),
        ({"parallelism": {"context_parallel_degree": 2}}, "context_parallel_degree = 2"),
        ({"parallelism": {"data_parallel_replicate_degree": 2}}, "data_parallel_replicate_degree = 2"),
        ({"parallelism": {"data_parallel_shard_degree": 2}}, "data_parallel_shard_degree = 2"),
        ({"training": {"enable_cpu_offload": True}}, "set deepspeed.offload_optimizer"),
        ({"training": {"layers": "0:2"}}, "training.layers = '0:2'"),
        ({"checkpoint": {"async_mode": "async"}}, "checkpoint.async_mode = 'async'"),
        ({"deepspeed": {"offload_parameters": True}}, "set deepspeed.zero_stage = 3, not 2"),
        ({"deepspeed": {"zero_stage": 3}, "compile": {"enable": True}}, "compile.enable"),
    ],
)
def test_refusals(values, says):
    if "engin" not in values and says != 'set engine = "deepspeed" too':
        values = {"engine": "deepspeed", **values}
    with pytest.raises(ConfigError) as error:
        build_config(values)
    assert says in str(error.value)
