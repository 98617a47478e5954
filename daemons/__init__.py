"""Shard daemons: the worker processes, which run inside the interpreters of backend groups.

They import the standard library, torch, numpy, gguf, msgspec, ``lucevisor.model`` and ``lucevisor.protocol``,
nothing else.

process, its loop and reports    main, options, worker, inbox, pulse, errors, failures, identities
steps                            runner (read it first), boundary, token_ring, deferred, step_output, graphs,
                                 cuda_graphs, warm
devices                          device, check, timing, tuning
tokens                           sampling, draws, scoring, masks, repetition, truncation
attention backends               ops/attention (torch), ops/triton/paged_attention, ops/cpu/paged_attention.h;
                                 ops/selection chooses
"""
