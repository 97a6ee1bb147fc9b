"""The out-of-memory message of fine-tuning: which part grew, when, and what to lower."""

import pytest
import torch

from farsight.launch.plan.hardware import Device
from farsight.launch.plan.out_of_memory import explain_out_of_memory
from farsight.training.memory_recorder import MemoryMarks, MemoryRecorder
from tests.launch.test_finetune_memory import finetune_memory, paper

GIB = 2**30


def test_the_part_that_grew_is_named():
    config, memory = paper(), finetune_memory(paper())
    device = Device("a GPU", 20 * GIB)
    base, state = memory.parameters, memory.gradients + memory.optimizer
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    marks = MemoryMarks(base, base + state, base + state + 12 * GIB, "backward")
    text = explain_out_of_memory(error, config, marks, device)
    assert text.startswith(
        "Out of memory in the backward pass on a GPU: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert "activations, loss and transient: " in text
    assert f"{(12 * GIB - (memory.peak - base - state)) / GIB:.2f} GiB more than estimated" in text
    assert "--training.local_batch_size 1" in text

    text = explain_out_of_memory(error, config, MemoryMarks(2 * base, 0, 0, "loading"), device)
    assert "while loading the base" in text
    assert "base and trained parameters: " in text
    text = explain_out_of_memory(
        error, config, MemoryMarks(base, base + 3 * state, base + 3 * state, "optimizer"), device
    )
    assert "while the optimizer stepped" in text
    assert f"gradients and optimizer: {2 * state / GIB:.2f} GiB more" in text


def test_where_nothing_grew_the_device_is_named():
    config, memory = paper(), finetune_memory(paper())
    base = memory.parameters
    error, marks = torch.OutOfMemoryError("no"), MemoryMarks(base, 0, memory.peak, "forward")
    assert "other processes use memory" in explain_out_of_memory(error, config, marks, Device("large", 80 * GIB))
    text = explain_out_of_memory(error, config, marks, Device("less", 7 * GIB))
    assert f"All as estimated: the peak is {memory.peak / GIB:.2f} GiB, and the run had 7.00" in text
    assert "By the estimate it would fit with --training.local_batch_size 1" in text


def test_recorder_reads_where_it_failed(monkeypatch):
    amounts = iter([5, 7, 8, 11])
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: next(amounts))
    recorder = MemoryRecorder(torch.device("cuda"))
    assert recorder.marks.phase == "loading"
    recorder.loaded()
    with recorder.during("forward"):
        pass
    recorder.stepped()
    recorder.stepped()
    with pytest.raises(torch.OutOfMemoryError), recorder.during("backward"):
        raise torch.OutOfMemoryError("no")
    assert recorder.marks == MemoryMarks(5, 7, 8, "backward")
    assert MemoryRecorder(torch.device("cpu")).marks == MemoryMarks(phase="loading")
