"""Runs steps on the device: fixed input buffers, the forward, the sampler."""
