"""Composition root: a running supervisor, its status, logs and run directory.

supervisor  run (READ FIRST), rundir, endpoint, reload, handover, systemd, process
reports     status, logs, log_reader, traces
model       model_files, model_source, model_cards, compression
commands    benchmark, cache_operations
"""
