"""What saves device memory: recomputation, offloaded activations, swapped optimizer state."""
