"""Speculative decoding: how many tokens to draft, how many drafts to verify, and when a drafter rests.

Pure: verdicts and measured times in, widths out.  Knows no requests, steps or pages; scheduling/drafts.py does.

policy      speculation (READ FIRST), choices, probes, budget, rest
estimates   acceptance, costs, decode_times
drafts      lookup
records     request, statistics
"""
