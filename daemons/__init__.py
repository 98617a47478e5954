"""Shard daemons: the worker processes, which run inside the interpreters of backend groups.

They import the standard library, torch, numpy, gguf, msgspec, ``lucevisor.model`` and ``lucevisor.protocol``,
nothing else.

process, its loop and reports    main, options, worker, message_queue, heartbeat, errors, failures, file_identity
steps                            runner (read it first), boundary, token_ring, async_output, step_output, graphs,
                                 cuda_graphs, warmup
devices                          device, check, timing, tuning
tokens                           sampling, random_sampling, logprobs
attention backends               ops/attention (torch), ops/triton/paged_attention, ops/cpu/paged_attention.h;
                                 ops/selection chooses
"""
