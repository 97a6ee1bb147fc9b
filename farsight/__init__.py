"""Modules that every command and package shares; nothing here depends on training."""
