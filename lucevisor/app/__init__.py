"""Composition root: a running supervisor, its status, logs and run directory.

supervisor  run (READ FIRST; configuration reload), admin (and the HTTP endpoint), rundir, handover, systemd
reports     status, logs, traces
model       model_files (and model cards), discovery, pflash
commands    benchmark
"""
