"""Tools for runs and records, one package each: audit, calibrate, conformance, doctor, explain, probe, report."""
