"""Requests, scheduler, pipeline, and the engine that joins them.  Knows token and page ids: no text, no tensors.

engine      core (READ FIRST) with its bases standstill and prefix_access; limits, settings, statistics, validation
requests    request, handle, sequence, running, rows
who starts  queue, shares, admission, preemption, waits
next step   scheduler, scheduler_state, step, batching, chunking, step_times, backlog, run_ahead
pipeline    pipeline, pipeline_steps, pipeline_drafts
prefixes    prefix_reuse, checkpoints, refill, lone_work
drafts      drafting, speculation, acceptance, lookup, draft_costs, decode_times, round_gaps, draft_budget,
            draft_statistics
losses      recovery, recovery_stages, recovery_rebuild, journal
masks       constraint, masking
KV Flash    ranking, relevance
"""
