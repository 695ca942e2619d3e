"""Adapters: each puts a region into one trainer or sampler, and borrows as little of it as it can."""
