"""The core: records in, a loss and sums out. Pure tensor code, without a framework."""
