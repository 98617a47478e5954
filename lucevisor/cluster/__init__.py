"""Groups on other hosts."""
