"""One placement brought to life: groups, buffers, links, weights and the pipeline made of them.

service     service (READ FIRST), orders; readiness, holding, watchdog
deployment  deployment, placing, sizes, assembly, draft_assembly, scoring, engine_limits, group_settings, affinity
before it   preflight, installed, probe, speeds, tuning
weights     served_model, served_weights, weights, weight_digests, digest_cache, cache_files
state       journal_rows, swap_space, state_memory, successors, reload
"""
