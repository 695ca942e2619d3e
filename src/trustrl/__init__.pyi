# The public names of trustrl, each in one place. `__init__.py` reads this file and imports a name on first use.

from trustrl import errors as errors, functional as functional, regions as regions
from trustrl.config.terms import (
    EntropyBonus as EntropyBonus,
    FixedLength as FixedLength,
    KLPenalty as KLPenalty,
    SequenceMeanTokenMean as SequenceMeanTokenMean,
    SequenceMeanTokenSum as SequenceMeanTokenSum,
    TokenMean as TokenMean,
    TokenSum as TokenSum,
    TokenWeights as TokenWeights,
)
from trustrl.core.check import check as check
from trustrl.core.diagnostics import merge as merge, rates as rates
from trustrl.core.policy_loss import policy_loss as policy_loss
from trustrl.core.records import (
    FullVocabulary as FullVocabulary,
    PolicyTokens as PolicyTokens,
    RolloutTokens as RolloutTokens,
    TopK as TopK,
)
from trustrl.core.sampling import Sampling as Sampling
from trustrl.core.token_logprobs import token_logprobs as token_logprobs
from trustrl.regions.loading import config_from_dict as config_from_dict, config_to_dict as config_to_dict
from trustrl.regions.presets import preset as preset, presets as presets

__version__: str
