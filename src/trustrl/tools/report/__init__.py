"""Reports on runs of any trainer for `trustrl report` and `trustrl watch`: terminal text and self-contained HTML pages.

reported_runs      runs with labels, regions and settings in plain words, and verdicts
token_sample       what the region did to each recorded token: counts over all of them, and a bounded sample
shown_completions  the completions that a page shows, with their groups
evidence_charts    the curves on which the numbers of causes stand
charts             the curves over the steps, with the explanation and the healthy range of each
safe_text          escaping of untrusted text
parting            the settings, prompts and metrics in which two runs part
report_contents    everything above as plain data, and as text for the terminal
page_data          the data of the page's script
html_page          the report as one HTML page; cause_section and html_sections render its parts, page/ holds its script
prometheus_text    the newest values of runs for node exporter's textfile collector
live_view          a report that is written again while a run trains
"""
