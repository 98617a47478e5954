"""Requests, scheduler, pipeline, and the engine that joins them.

engine      core (READ FIRST); changes, limits, statistics, validation
requests    request, sequence, running, rows
scheduler   scheduler: who starts, who gives way, and what the next step computes; step
pipeline    pipeline
prefixes    prefix_reuse
drafts      drafting: the scheduler's part; spec_decode/: controller, ngram, statistics
losses      recovery, rebuild, journal
masks       constraint, masking
KV Flash    page_ranking
"""
