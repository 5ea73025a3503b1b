"""Runs the peers and compares them with us: `python -m baselines.compare`."""
