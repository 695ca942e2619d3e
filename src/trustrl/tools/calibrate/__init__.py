"""Estimate of sampler-trainer noise from records and a recommended threshold, for `trustrl calibrate`.

noise_counts  counts of the noise and of the effect of each threshold, which add over files
calibration   quantiles, curves, and the recommendation: the object behind `--json`, as text and as a figure
"""
