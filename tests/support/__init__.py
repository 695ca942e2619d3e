"""Code that several tests share: batches, models, reference answers and scripts. Nothing here is a test."""
