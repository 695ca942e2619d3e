"""Tools for runs and records, one package each, such as audit, bound, calibrate, explain and report."""
