"""Requests, scheduler, pipeline and the loop that joins them.  Token ids and ids of pages only: no text, no tensors."""
