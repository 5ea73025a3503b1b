"""Traces: one a request, from the load generator's client span through the service's server span to queue, prefill and decode."""
