"""Requests, scheduler, pipeline, and the engine that joins them.

engine      plain_loop (READ FIRST), core: a state machine; events: what goes in and out; shell: its asyncio side
            limits, statistics, validation
requests    request, sequence, running_requests, output_rows
scheduler   scheduler: what the next step computes; policy: admission and preemption (who starts, who gives way); step
pipeline    pipeline
prefixes    prefix_reuse
drafts      drafting: the scheduler's part; spec_decode/: controller, ngram, statistics
losses      recovery, journal
replicas    router: which replica gets a request (pure); replicas: several engines as one
masks       constraint
KV Flash    page_ranking
"""
