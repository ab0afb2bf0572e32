"""Device kernels and their torch twins."""
