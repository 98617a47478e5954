"""Composition root: a running supervisor, its status, logs and run directory.

supervisor  run (READ FIRST), api_ports, run_options, rundir, endpoint, signals, reload, succession, handover, systemd
reports     status, progress, group_metrics, logs, log_lines, log_reader, traces
model       model_files, model_source, model_cards, compression
commands    benchmark, bench_cases, llama_bench, logits, cache_operations
process     collector, open_files
"""
