"""Placements brought to life: `service` (read it first) has engines, `deployment` one placement with its daemons."""
