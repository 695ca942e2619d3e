"""Does a policy loss keep its promises? A corpus of small batches, each with what plain arithmetic or a paper expects.

target     a function by its name, imported and never evaluated from text
adapters   who calls it how: plain, verl, skyrl, trustrl
batches    the small tensors
answers    a loss and its gradient on one batch
expectations, hygiene, faults, tables, bounds   what is expected, and what is only measured
running    every expectation of a kind, on one loss
"""
