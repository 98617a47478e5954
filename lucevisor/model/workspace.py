"""Sizes of temporary memory, which the daemons' operations keep to and the planner sets aside."""

from __future__ import annotations

DEQUANT_ELEMENTS = 1 << 26
"""Weights of a quantised matrix that are dequantised at a time."""
SCORE_ELEMENTS = 1 << 26
"""Attention scores, float32, that plain-torch attention holds at a time; masking and softmax hold as many again."""
SAMPLED_ROWS = 256
"""Rows whose logits exist at once, where a step samples more than it has sequences: those of drafts."""
DRAW_ROWS = 64
"""Rows from which tokens are drawn at a time."""
WIDE_DRAW_ROWS = 4
"""Rows at a time whose filters keep so many tokens that the whole vocabulary is sorted."""
HOST_CHUNK_PAGES = 64
"""Pages in host memory that KV Flash copies to a device at a time, of one layer; two such chunks are there at once."""
GRAPH_ROWS = 1024
"""Rows up to which a GPU captures steps of one long slice."""
GRAPH_LENGTH = 8192
"""Positions up to which such a step attends."""
INT8_GEMV_ROWS = 8
"""Rows up to which a cpu multiplies an int8 matrix as stored; for more rows it is widened first."""
