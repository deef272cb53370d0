"""Simulated devices: their memory, their tensors, and the rehearsal of a model's run on them."""
