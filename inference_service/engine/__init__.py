"""The engine: decides what each step computes. It knows tokens and pages, and neither tensors nor gRPC."""
