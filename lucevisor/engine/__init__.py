"""Requests, scheduler, pipeline, and the engine that joins them.  Knows token and page ids: no text, no tensors.

engine      core (READ FIRST) with its base standstill, slot_access; limits, settings, statistics, validation
requests    request, handle, sequence, running, rows
scheduling  scheduling/: who starts (queue, shares, admission, preemption, waits), what the next step computes
            (scheduler, state, batching, chunking, step_times, backlog, run_ahead); step
pipeline    pipeline/: pipeline, steps, drafts
prefixes    prefix_reuse, checkpoints, refill, lone_work
drafts      drafting, speculation, acceptance, lookup, draft_costs, decode_times, round_gaps, draft_budget,
            draft_statistics, drafter_rest
losses      recovery/: recovery, stages, rebuild; journal
masks       constraint, masking
KV Flash    ranking, relevance
"""
