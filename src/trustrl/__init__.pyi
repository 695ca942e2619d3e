# The public names of trustrl, each in one place. `__init__.py` reads this file and imports a name on first use.

from trustrl import errors as errors, functional as functional
from trustrl.config.axes import Needs as Needs, PrefixBudget as PrefixBudget, Region as Region
from trustrl.config.statistics import (
    BinaryKL as BinaryKL,
    BinaryTV as BinaryTV,
    FullKL as FullKL,
    FullTV as FullTV,
    LogRatio as LogRatio,
    Ratio as Ratio,
    SampledK2 as SampledK2,
    SampledK3 as SampledK3,
    SequenceRatio as SequenceRatio,
    SymmetricBinaryKL as SymmetricBinaryKL,
    TopKKL as TopKKL,
    TopKTV as TopKTV,
)
from trustrl.config.terms import (
    MIS as MIS,
    TIS as TIS,
    DivergenceGate as DivergenceGate,
    EntropyBonus as EntropyBonus,
    FixedLength as FixedLength,
    IcePop as IcePop,
    KLPenalty as KLPenalty,
    SequenceMeanTokenMean as SequenceMeanTokenMean,
    SequenceMeanTokenSum as SequenceMeanTokenSum,
    TokenMean as TokenMean,
    TokenSum as TokenSum,
    TokenWeights as TokenWeights,
)
from trustrl.core.check import check as check
from trustrl.core.clean import CleanTokens as CleanTokens
from trustrl.core.decision import Decision as Decision
from trustrl.core.diagnostics import merge as merge, rates as rates
from trustrl.core.divergences.interval import Interval as Interval
from trustrl.core.policy_loss import policy_loss as policy_loss
from trustrl.core.records import (
    FullVocabulary as FullVocabulary,
    PolicyTokens as PolicyTokens,
    RolloutTokens as RolloutTokens,
    TopK as TopK,
)
from trustrl.core.sampling import Sampling as Sampling
from trustrl.core.token_logprobs import token_logprobs as token_logprobs
from trustrl.regions import *  # the settings class of each region
from trustrl.regions.loading import (
    config_from_dict as config_from_dict,
    config_to_dict as config_to_dict,
    register_region as register_region,
)
from trustrl.regions.presets import preset as preset, presets as presets

__version__: str
