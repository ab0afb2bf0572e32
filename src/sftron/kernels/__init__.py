"""Device kernels, each alongside its torch twin; importable with torch alone, without Triton."""
