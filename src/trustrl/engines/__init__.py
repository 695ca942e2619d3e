"""Engine adapters. Each one adds trust regions to a trainer or a sampler through as few seams as possible."""
