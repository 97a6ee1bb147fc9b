"""Shared ground: what every command and package needs, and nothing of training."""
