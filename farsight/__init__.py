"""Distributed pre-training and long-context extension for Llama-style language models."""

__version__ = "0.1.0"
