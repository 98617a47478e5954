"""Placement of layers on devices, and the sizes of pools, with reasons.  Touches no device."""
