"""Composition root: a running supervisor, its status, logs and run directory."""
