"""Runs of any trainer as plain data: metrics, completions, and the addresses of token records. No torch."""
