"""Single operators, backend against backend, on the machine at hand: `python -m baselines.kernels`."""
