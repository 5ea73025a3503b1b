"""The front end: gRPC on one side, the engine's socket on the other. It imports no torch."""
