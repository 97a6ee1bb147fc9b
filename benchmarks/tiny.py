"""Settings of runs that take a second on a CPU, for tests and for benchmarks of whole runs."""

import sysconfig

MODEL = """
[architecture]
vocab_size = 0
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
ffn_dim = 64
"""
"""Two layers of 39,000 parameters with a vocabulary of bytes."""

SETTINGS = f"""
[tokenizer]
kind = "bytes"

[data]
held_out = 0.05
sources = [{{ kind = "text", path = "{sysconfig.get_paths()["stdlib"]}/*.py" }}]

[activation_checkpoint]
mode = "none"

[optimizer]
lr = 1e-2

[lr_scheduler]
warmup_steps = 2
"""
"""The bytes of 170 files of the standard library (listing all of its files takes a second), and an optimizer that learns
something in a few steps."""
