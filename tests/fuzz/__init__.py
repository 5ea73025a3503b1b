"""Random input to a real server and to the configuration: see __main__.py."""
