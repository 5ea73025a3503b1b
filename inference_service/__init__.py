"""A gRPC service that generates text: FlashInfer on a GPU, plain PyTorch on a CPU."""

__version__ = "0.1.0"
