"""Requests, scheduler, pipeline, and the engine that joins them.  Knows token and page ids: no text, no tensors.

engine      core (READ FIRST) with its parts drafter, freezer, slot_access; changes, limits, settings, statistics,
            validation
requests    request, handle, sequence, running, rows
scheduling  scheduling/: who starts (queue, shares, admission, preemption, waits), what the next step computes
            (scheduler, state, batching, chunking, step_times, backlog, run_ahead, round_gaps; drafts, draft_notes,
            unseen); step
pipeline    pipeline/: pipeline, steps, drafts
prefixes    prefix_reuse, checkpoints
drafts      drafting/: how many, from which source, and what they cost (speculation, budget, rest; acceptance, costs,
            decode_times; lookup; request, statistics)
losses      recovery/: recovery, stages, rebuild, replay; journal
masks       constraint, masking
KV Flash    ranking, relevance
"""
