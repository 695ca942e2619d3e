"""Improvement bound of DPPO on recorded tokens, for `trustrl bound`.

theorem       the two penalties, and the largest TV at which the bound is positive
update_sums   sums over the sequences of each update, which add over files
bound_report  sums as named numbers, the object behind `--json`, and as text
"""
