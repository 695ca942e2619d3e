"""Reports on runs of any trainer for `trustrl report` and `trustrl watch`: terminal text and self-contained HTML pages.

reported_runs        runs with labels, regions and verdicts
token_sample         a bounded sample of the recorded tokens, with counts over all of them
shown_completions    the completions that a page shows, with their groups
recorded_actions     what the region did to each recorded token
charts               the curves over the steps
metric_explanations  the explanation of each chart, and numeric ranges of healthy values
region_descriptions  regions and settings in plain words
safe_text            escaping of untrusted text
report_contents      everything above as plain data
terminal_text        the report for the terminal
page_data            the data of the page's script
html_page            the report as one HTML page; html_runs and html_sections render its parts, page/ holds its script
live_view            a report that is written again while a run trains
"""
