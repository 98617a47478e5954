"""Composition root: a running supervisor (run, read it first), its status, logs and run directory."""
