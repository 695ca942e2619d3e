"""Reports on run directories for `trustrl report`: a terminal summary and a self-contained HTML page.

run_folders          recipe, metrics, and status of run directories
token_sample         a bounded sample of the recorded tokens, with counts over all of them
recorded_actions     what the region did to each recorded token
charts               the curves over the steps
region_descriptions  regions and recipes in plain words
safe_text            escaping of untrusted text
report_contents      everything above as plain data
terminal_text        the report for the terminal
html_page            the report as one HTML page; its script and style are in page/
"""
