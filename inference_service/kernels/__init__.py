"""Operators: a protocol each, a pure PyTorch reference, and the table that says which backend runs where."""
