"""The handlers of the HTTP endpoints."""
