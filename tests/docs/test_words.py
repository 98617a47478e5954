"""An engineer of vLLM, llama.cpp or systemd finds the place by searching for the field's word."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    "abort": "lucevisor/engine/request.py",
    "acceptance": "lucevisor/engine/spec_decode/statistics.py",
    "admission": "lucevisor/engine/scheduler.py",
    "async scheduling": "daemons/async_output.py",
    "auxiliary hidden states": "daemons/draft/inputs.py",
    "batch.invarian": "daemons/ops/batch_invariant.py",
    "bitmask": "lucevisor/protocol/steps.py",
    "block manager": "lucevisor/kv/page_pool.py",
    "block table": "lucevisor/kv/page_table.py",
    "chunked prefill": "lucevisor/engine/scheduler.py",
    "continuous batching": "lucevisor/engine/scheduler.py",
    "CUDA graph": "daemons/cuda_graphs.py",
    "draft model": "lucevisor/model/drafters/draft_model.py",
    "encoder cache": "lucevisor/deployment/extra_models.py",
    "graceful": "lucevisor/api/server.py",
    "grouped gemm": "daemons/ops/triton/grouped_gemm.py",
    "guided decoding": "lucevisor/api/constraint.py",
    "intermediate tensors": "daemons/boundary.py",
    "KV cache group": "lucevisor/model/values.py",
    "KV offload": "lucevisor/kv_transfer/host_tier.py",
    "memory profiling": "lucevisor/placement/cost.py",
    "MMVQ": "daemons/ops/cuda/gemv.py",
    "MTP": "lucevisor/model/drafters/mtp.py",
    "paged attention": "daemons/ops/triton/paged_attention.py",
    "pipeline parallel": "lucevisor/placement/planner.py",
    "pooler": "daemons/models/blocks.py",
    "preemption": "lucevisor/engine/scheduler.py",
    "prefix cache": "lucevisor/kv/prefix_cache.py",
    "prompt_logprobs": "daemons/logprobs.py",
    "rate.limit": "lucevisor/api/errors.py",
    "reasoning parser": "lucevisor/text/output_parser.py",
    "rejection sampling": "daemons/sampling.py",
    "rerank": "lucevisor/api/dialects/rerank.py",
    "sleep mode": "daemons/parking.py",
    "speculative prefill": "lucevisor/compression/__init__.py",
    "structured output": "lucevisor/engine/constraint.py",
    "tensor split": "lucevisor/placement/planner.py",
    "tool parser": "lucevisor/text/tools/__init__.py",
    "warm standby": "lucevisor/supervision/spares.py",
}


@pytest.mark.parametrize("word", WORDS)
def test_the_fields_word_is_in_the_file_that_does_it(word):
    assert re.search(word, (ROOT / WORDS[word]).read_text(encoding="utf-8"), re.IGNORECASE)
