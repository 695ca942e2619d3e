"""Run folders -> a summary for a terminal, and one page that opens anywhere without a network."""
