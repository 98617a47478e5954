"""Speculative decoding: how many tokens to draft, where drafts come from, and what they yield."""
