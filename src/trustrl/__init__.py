"""trustrl: how far a language model may move in one reinforcement-learning update.

Names are loaded when first used, so that settings, command lines and `--help` do not pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "trustrl.build": ("register_region",),
    "trustrl.checking": ("check",),
    "trustrl.config.axes": ("Needs", "PrefixBudget", "Region", "TrustRegion"),
    "trustrl.config.loading": ("config_from_dict", "config_to_dict"),
    "trustrl.config.presets": ("preset", "presets"),
    "trustrl.config.regions": (
        "CISPO", "CPPO", "DPPO", "DRPO", "GSPO", "IPO", "KPOP", "PPO", "SAPO", "SPO", "TRM", "TROLL",
        "MiniRL", "PolicyGradient",
    ),
    "trustrl.config.statistics": (
        "BinaryKL", "BinaryTV", "FullKL", "FullTV", "Ratio", "SampledK2", "SampledK3", "SequenceRatio",
        "SymmetricBinaryKL", "TopKKL", "TopKTV",
    ),
    "trustrl.config.terms": (
        "EntropyBonus", "FixedLength", "IcePop", "KLPenalty", "MIS", "SequenceMeanTokenMean",
        "SequenceMeanTokenSum", "TIS", "TokenMean", "TokenSum", "TokenWeights",
    ),
    "trustrl.diagnostics": ("Sums", "merge", "rates"),
    "trustrl.divergences.interval": ("Interval",),
    "trustrl.errors": (
        "ConfigError", "DownloadError", "DuplicateNameError", "EngineError", "IncompatibleSamplingError",
        "MissingDataError", "MissingPackageError", "NonFiniteError", "RecordError", "TrustRLError",
        "TrustRLWarning", "UnknownNameError",
    ),
    "trustrl.metrics": ("METRICS",),
    "trustrl.objective": ("LossOutput", "policy_loss"),
    "trustrl.records": ("FullDivergence", "FullVocabulary", "PolicyTokens", "RolloutTokens", "TopK"),
    "trustrl.regions.decision": ("Decision",),
    "trustrl.sampling": ("Sampling", "within_kept"),
    "trustrl.tokens": ("Tokens",),
    "trustrl.kernels.outputs": ("TokenLogprobs", "TopLogprobs"),
    "trustrl.kernels.vocab_parallel": ("VocabShard",),
    "trustrl.vocabulary": ("Anchor", "token_logprobs"),
}  # fmt: skip
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_WHERE)]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:  # what `__getattr__` gives, for type checkers; a test holds the two together
    from trustrl.build import register_region as register_region
    from trustrl.checking import check as check
    from trustrl.config.axes import (
        Needs as Needs,
        PrefixBudget as PrefixBudget,
        Region as Region,
        TrustRegion as TrustRegion,
    )
    from trustrl.config.loading import config_from_dict as config_from_dict, config_to_dict as config_to_dict
    from trustrl.config.presets import preset as preset, presets as presets
    from trustrl.config.regions import (
        CISPO as CISPO,
        CPPO as CPPO,
        DPPO as DPPO,
        DRPO as DRPO,
        GSPO as GSPO,
        IPO as IPO,
        KPOP as KPOP,
        PPO as PPO,
        SAPO as SAPO,
        SPO as SPO,
        TRM as TRM,
        TROLL as TROLL,
        MiniRL as MiniRL,
        PolicyGradient as PolicyGradient,
    )
    from trustrl.config.statistics import (
        BinaryKL as BinaryKL,
        BinaryTV as BinaryTV,
        FullKL as FullKL,
        FullTV as FullTV,
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
    from trustrl.diagnostics import Sums as Sums, merge as merge, rates as rates
    from trustrl.divergences.interval import Interval as Interval
    from trustrl.errors import (
        ConfigError as ConfigError,
        DownloadError as DownloadError,
        DuplicateNameError as DuplicateNameError,
        EngineError as EngineError,
        IncompatibleSamplingError as IncompatibleSamplingError,
        MissingDataError as MissingDataError,
        MissingPackageError as MissingPackageError,
        NonFiniteError as NonFiniteError,
        RecordError as RecordError,
        TrustRLError as TrustRLError,
        TrustRLWarning as TrustRLWarning,
        UnknownNameError as UnknownNameError,
    )
    from trustrl.kernels.outputs import TokenLogprobs as TokenLogprobs, TopLogprobs as TopLogprobs
    from trustrl.kernels.vocab_parallel import VocabShard as VocabShard
    from trustrl.metrics import METRICS as METRICS
    from trustrl.objective import LossOutput as LossOutput, policy_loss as policy_loss
    from trustrl.records import (
        FullDivergence as FullDivergence,
        FullVocabulary as FullVocabulary,
        PolicyTokens as PolicyTokens,
        RolloutTokens as RolloutTokens,
        TopK as TopK,
    )
    from trustrl.regions.decision import Decision as Decision
    from trustrl.sampling import Sampling as Sampling, within_kept as within_kept
    from trustrl.tokens import Tokens as Tokens
    from trustrl.vocabulary import Anchor as Anchor, token_logprobs as token_logprobs


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'trustrl' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
