"""Readers, one for each format. Each takes the files of a folder and returns what it found in them."""
