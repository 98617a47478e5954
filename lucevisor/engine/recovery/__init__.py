"""What happens to requests and lost stages when a daemon goes: holds, rebuilds from the journal."""
