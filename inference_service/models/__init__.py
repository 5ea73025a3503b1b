"""Decoder models: configuration, families, checkpoints. The package itself imports nothing: not all need torch."""
