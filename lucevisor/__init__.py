"""Lucevisor: one machine for local language models out of GPUs that cannot share one process."""

__version__ = "0.1.0"
