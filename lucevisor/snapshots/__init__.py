"""Prefix slots on disk: file format, policy, store, transfers between files and shards, tools."""
