"""Failure matrix: kills, full disks, clocks and rivals, and the state of a run after each of them."""
