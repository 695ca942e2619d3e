"""Tables of docs/guides/choosing-a-region.md: the recommended presets, their gain, and each claim of both papers.

    python studies/02-which-learns-most/claims.py

Reads the committed data of this study and of 01-which-region-wins, 03-which-tokens-masked and 05-which-statistic.
"""

import sys
from pathlib import Path

import answer_tables
import study
import verdicts
from second_study import GUIDE, MEASURES, by_arm, clip, families, gap, of_updates

import trustrl
from trustrl.regions.recommended import SAMPLED_TOKEN, TOP_K

STUDIES = Path(__file__).parents[1]
sys.path += [str(STUDIES / name) for name in ("01-which-region-wins", "03-which-tokens-masked", "05-which-statistic")]
sys.path.append(str(STUDIES / "shared"))
from pages import fill

REPLICATES, NOT, UNKNOWN = "**replicates**", "**does not**", "**cannot tell**"
PUBLISHED = "clip 0.2/0.28: 4 tuning seeds, and 5 of the first study, not registered"
AGAINST_CLIPS = f"{NOT} against a wide clip; {UNKNOWN} against the published one"


def both(arm: str, other: str, stage: str = "decide") -> str:
    """Returns the differences of two arms in area and in last accuracy."""
    runs = by_arm(study.read(stage))
    area, last = (gap(runs[arm], runs[other], measure) for measure in MEASURES)
    return f"area {area}, last accuracy {last}"


def to_published(arm: str) -> str:
    """Returns the differences to PPO's published clip: in area on tuning seeds, in accuracy in the first study."""
    from findings import family

    tuning = gap(answer_tables.chosen_runs(arm), answer_tables.published_runs())
    first = " and ".join(str(one) for one in family(("stale", "both"), [(arm, "ppo")]).values())
    return f"Clip 0.2/0.28: {tuning}; first study {first}"


def stability() -> list[str]:
    """Returns the row on runs that failed."""
    counts = answer_tables.failed_at_highest()
    arms = ("pg-is", "ppo", "dppo-binary-tv", "dppo-topk-tv", "troll", "dppo-binary-tv-capped", "dppo-topk-tv-capped")
    said = ", ".join(f"{answer_tables.NAMES.get(arm, f'`{arm}`')}: {counts[arm]}" for arm in arms)
    return [
        "DPPO and TROLL train more stably than PPO's clip",
        "runs that ended below their start, by learning rate; 16 updates, exploratory",
        f"at {answer_tables.HIGHEST:g}: {said}. At the tuned rates none of these fails, with or without a region",
        UNKNOWN,
    ]


def efficiency() -> list[str]:
    """Returns the row on DPPO against PPO."""
    runs, arm = by_arm(study.read("updates")), "dppo-binary-tv"
    four = gap(runs[of_updates(arm, 4)], runs[of_updates("ppo", 4)])
    return [
        "DPPO learns more from the same data than PPO's clip",
        f"Binary − PPO {clip()}, 16 updates, 60 seeds, registered (area); 4 updates, 20 seeds; {PUBLISHED}",
        f"16 updates: {both(arm, 'ppo')}. 4 updates: {four}. {to_published(arm)}",
        AGAINST_CLIPS,
    ]


def which_tokens() -> list[str]:
    """Returns the row on the tokens that PPO's clip masks."""
    import smollm2_clipping as clipping

    after = clipping.after(clipping.load(), max(clipping.UPDATES))
    masked, every = (100 * float((after["mu"][at] < clipping.RARE).mean()) for at in (after["ppo"], slice(None)))
    return [
        "PPO's clip masks rare tokens",
        "SmolLM2, 16 updates on one batch, one seed",
        f"{masked:.0f}% of the masked tokens had μ < {clipping.RARE:g}, where {every:.0f}% of all do",
        REPLICATES,
    ]


def statistics_of_tokens() -> list[str]:
    """Returns the row on divergences and ratios as measures of how far a policy moved."""
    from proxies import MODELS, TAIL, at_rate, primary

    statistics = ("tv_20", "log_r", "tv_binary")
    ranks = {s: ", ".join(f"{primary(name, 'rank', s).mean():.2f}" for name in MODELS) for s in statistics}
    ratio, binary = (
        [at_rate(name, "none", 4, s, TAIL)["lift"].mean() for name in MODELS] for s in ("log_r", "tv_binary")
    )
    ahead = sum(b > r for b, r in zip(binary, ratio, strict=True))
    return [
        "A divergence tells better than the ratio how far the policy moved",
        "three language models, 4 updates: correlation with the exact TV over all tokens; mean exact TV of the top 1%",
        f"Top-20 {ranks['tv_20']}; ratio {ranks['log_r']}; Binary {ranks['tv_binary']}. Top 1%: Binary above the "
        f"ratio on {ahead} of {len(MODELS)} models, not tested",
        f"{REPLICATES} for Top-K; {NOT} for Binary over all tokens; {UNKNOWN} in the tail",
    ]


def anchors() -> list[str]:
    """Returns the row on anchors."""
    answers = [one for one in families()["anchors"].areas[:4] if "TROLL" not in one.question]
    assert {one.verdict for one in answers} == {f"equal within {verdicts.MARGIN:g}"}
    said = "; ".join(f"{one.question} {verdicts.shown(one)}" for one in answers)
    return [
        "The mask must be anchored on the sampler μ; around π' training collapses",
        "16 updates, mismatch of 0.04 nats, 40 seeds, registered",
        f"{said}: all equal within {verdicts.MARGIN:g}. {answer_tables.counted(study.read('anchors'))} runs fail",
        f"{NOT} at this mismatch",
    ]


def topk() -> list[str]:
    """Returns the row on Top-K against Binary."""
    capped = both("dppo-topk-tv-capped", "dppo-binary-tv-capped", "cap")
    return [
        "Binary does as well as Top-K",
        "16 updates, 60 seeds, registered (area); with a cap of 2 on the weight 40 seeds, not registered",
        f"Top-K − Binary: {both('dppo-topk-tv', 'dppo-binary-tv')}; with a cap {capped}",
        f"{NOT} with 16 updates; {UNKNOWN} with fewer",
    ]


def troll() -> list[str]:
    """Returns the row on TROLL against the clip."""
    return [
        "TROLL learns more than PPO's clip",
        f"TROLL − PPO {clip()}, 16 updates, 60 seeds, not registered; {PUBLISHED}",
        f"{both('troll', 'ppo')}. {to_published('troll')}",
        AGAINST_CLIPS,
    ]


def table() -> str:
    """Returns the claims of both papers with the results."""
    rows = [row() for row in (stability, efficiency, which_tokens, statistics_of_tokens, anchors, topk, troll)]
    lines = ["| claim | test here | result | |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def presets() -> str:
    """Returns the recommended presets with their values."""
    lines = ["| your sampler records | preset | δ | cap on the weight π/μ |", "|---|---|---|---|"]
    for records, name in (("its top K", TOP_K), ("the sampled token's log-prob alone", SAMPLED_TOKEN)):
        region = trustrl.preset(name)
        assert isinstance(region, trustrl.regions.DPPO)
        lines.append(f"| {records} | `{name}` | {region.divergence.max_increase:g} | {region.max_ratio:g} |")
    return "\n".join(lines)


def gains() -> str:
    """Returns the gain over PPO's published clip for each number of updates on a rollout, as far as it was measured."""
    from findings import family

    (once,) = family(("mismatch",), [("dppo-binary-tv", "ppo")]).values()
    runs = by_arm(study.read("updates"))
    four = [gap(runs["dppo-binary-tv@4"], runs["ppo@4"], measure) for measure in MEASURES]
    many = {
        name: gap(answer_tables.chosen_runs(name), answer_tables.published_runs()) for name in (TOP_K, SAMPLED_TOKEN)
    }
    wide = {name: both(name, "ppo", "cap") for name in many}
    rows = [
        ("1", f"none: {once} in final accuracy", "`dppo-binary-tv`, without a cap; vLLM in bf16, 5 seeds, first study"),
        (
            "4",
            f"not measured against it. Over PPO {clip()} none: area {four[0]}, last accuracy {four[1]}",
            "`dppo-binary-tv`, without a cap; 20 seeds, not registered",
        ),
        ("8", "not measured", "–"),
        (
            "16",
            f"top K: area {many[TOP_K]}; sampled token: area {many[SAMPLED_TOKEN]}. Over PPO {clip()} "
            f"top K: {wide[TOP_K]}; sampled token: {wide[SAMPLED_TOKEN]}",
            "4 tuning seeds, not registered; 40 seeds, of which the area of the top K against PPO is registered",
        ),
    ]
    lines = ["| updates on a rollout | gain over clip-higher | evidence |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def page() -> None:
    """Writes the marked blocks of the guide."""
    for name, make in {"presets": presets, "answers": gains, "claims": table}.items():
        fill(GUIDE, name, make())


if __name__ == "__main__":
    page()
