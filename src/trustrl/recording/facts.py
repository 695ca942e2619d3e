"""A step's totals as the facts that triggers look at."""

from trustrl.diagnostics import Sums
from trustrl.recording.triggers import OF, Facts


def facts_of(step: int, sums: Sums) -> Facts:
    """The facts in a step's totals; waits for the device, once for the sums that are read."""
    added = sums.added
    histograms = {name: added[f"histogram/{name}"].tolist() for name in OF if f"histogram/{name}" in added}
    faults = {name.removeprefix("fault/"): int(x) for name, x in added.items() if name.startswith("fault/")}
    entropy = None
    if "entropy/kept" in added:
        measured = float(added["entropy/kept_measured"] + added["entropy/stopped_measured"])
        if measured:
            entropy = float(added["entropy/kept"] + added["entropy/stopped"]) / measured
    return Facts(step, histograms, entropy, {name: count for name, count in faults.items() if count})
