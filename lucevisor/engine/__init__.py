"""Requests, scheduler, pipeline, and the engine that joins them.  Knows token and page ids: no text, no tensors."""
