"""Many devices: the mesh of ranks, gradients summed over them, and recomputation of activations."""
