"""What `[profiling]` writes."""

import json

import pytest

from farsight.configs.load import build_config
from farsight.errors import ConfigError
from tests.running import train

SHORT = ["--training.steps=4", "--validation.enable=false", "--checkpoint.enable=false"]


def test_traces_of_the_steps_that_were_asked_for(tmp_path):
    options = ["--profiling.enable_profiling", "--profiling.profile_freq=2", "--profiling.profiler_warmup=1"]
    done = train(
        tmp_path / "run",
        *SHORT,
        *options,
        "--profiling.enable_memory_snapshot",
        "--training.local_batch_size=2",
        ranks=2,
    )
    for rank in (0, 1):
        trace = tmp_path / "run" / "profile_traces" / "iteration_2" / f"rank{rank}_trace.json"
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        assert any("banded_attention" in event.get("name", "") for event in events)
    assert sorted(path.name for path in (tmp_path / "run" / "profile_traces").iterdir()) == [
        "iteration_2",
        "iteration_4",
    ]
    assert "no snapshot is written" in done.stderr


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"profiling": {"profile_freq": 3}}, "profile_freq = 3 is less than the 3 steps"),
        ({"activation_checkpoint": {"mode": "memory_budget"}}, "set compile.enable = true"),
        ({"activation_checkpoint": {"selective_ac_option": "all"}}, 'must be "op", "attention" or a number'),
        (
            {
                "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
                "compile": {"enable": True},
                "parallelism": {"context_parallel_degree": 2},
            },
            'set it to "attention", or compile.enable = false',
        ),
    ],
)
def test_what_can_not_be(values, says):
    with pytest.raises(ConfigError, match=says):
        build_config(values)
