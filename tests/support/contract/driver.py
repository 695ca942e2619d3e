"""What a sampler provides to be tested: a running engine, and the calls that its row of the table needs.

A driver is test code of one sampler. It sends the adapter's request to the real engine, and returns the adapter's
records.
"""

from typing import Protocol


class Cannot(Exception):
    """The sampler cannot do what a row asks for. The message says why, and is the row's entry."""


class Driver(Protocol):
    """Made with the folder of the first weights and the name of an engine, see `rows.row`."""

    version: str

    order: tuple
    """The truncations in the order in which this sampler applies them."""

    facts: dict
    """About the last `sample`: `cached`, prompt tokens from the prefix cache, and `chunks`, steps of prefill."""

    def sample(self, prompts, parameters, wanted):
        """Records of each prompt's completions, as lists. `parameters` is one dictionary, or one per prompt."""

    def sample_raw(self, prompts, parameters):
        """A fault: records with log-probs from before the temperature or the truncation."""

    def aborted(self, prompt, parameters, wanted, after):
        """The record of a request that is aborted after about so many tokens."""

    def update(self, folder, version):
        """Loads other weights while no request runs."""

    def updated_inside(self, prompt, parameters, wanted, after, folder, version):
        """The record of a request during which, after about so many tokens, the weights change."""

    def quantized(self, kind, folder):
        """Folder of the distribution that an engine with weights of this kind has, or `Cannot`."""
