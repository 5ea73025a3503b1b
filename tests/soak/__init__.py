"""A server under everything at once, for long: see __main__.py."""
