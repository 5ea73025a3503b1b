"""Decoder models: configuration, families, checkpoints. Nothing here is imported with the package, so that no one pays for torch unasked."""
