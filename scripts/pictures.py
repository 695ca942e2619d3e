"""Pictures of the concepts, drawn as SVG: docs/figures/{four-policies,clip-mask-project,one-step,choice}.svg.

python scripts/pictures.py    writes all of them again

The simplex has the numbers of docs/concepts/clip-mask-project.md, computed with the library. The choice has the presets
of `trustrl.regions.recommended`.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch

import trustrl.functional as F
from trustrl.regions import DPPO, PPO
from trustrl.regions.presets import preset
from trustrl.regions.recommended import SAMPLED_TOKEN, TOP_K

FOLDER = Path(__file__).parents[1] / "docs/figures"
Point = tuple[float, float]

STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --soft: #57606a; --edge: #d0d7de; --box: #f6f8fa; --ours: #0969da;
  --ourbox: #ddf4ff; --bad: #cf222e; --good: #1a7f37; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --edge: #3d444d; --box: #161b22; --ours: #58a6ff;
    --ourbox: #12294a; --bad: #ff7b72; --good: #3fb950; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--edge); }
.ours { fill: var(--ourbox); stroke: var(--ours); } .name { font-weight: 600; }
.soft { font-size: 12px; fill: var(--soft); }
.title { font-size: 14px; font-weight: 600; } .line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.region { fill: var(--ours); fill-opacity: .25; stroke: var(--ours); } .triangle { fill: none; stroke: var(--soft); }
.dash { stroke-dasharray: 4 3; } .dot { fill: var(--ink); } .out { stroke: var(--bad); } .in { stroke: var(--good); }
.outdot { fill: var(--bad); } .indot { fill: var(--good); } .head { fill: var(--soft); }
"""
HEAD = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
MARKER = f'<defs>{HEAD}<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """Returns a whole file: paper, then the parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">\n<style>{STYLE}</style>\n{MARKER}\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(at: Point, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Returns a line of text."""
    return f'<text class="{kind}" x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(at: Point, size: Point, lines: Sequence[str], kind: str = "box") -> str:
    """Returns a box whose first line is its name."""
    (x, y), (width, height) = at, size
    first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    written = [
        text((x + width / 2, first + 16 * row), line, "soft" if row else "name") for row, line in enumerate(lines)
    ]
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>' + "".join(written)


def arrow(*points: Point, kind: str = "") -> str:
    """Returns a line through the points, with a head at its end."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="line {kind}" d="M{path}" marker-end="url(#head)"/>'


def four_policies() -> str:
    """Returns the four policies on a timeline: one rollout and four updates."""
    parts = [text((14, y), lane, "title", "start") for y, lane in ((57, "sampler"), (145, "trainer"), (292, "frozen"))]
    parts += [f'<path class="line dash" d="M14 {y}H706" stroke-opacity=".4"/>' for y in (105, 246)]
    parts.append(box((90, 28), (150, 52), ("μ, behavior", "draws the tokens, θ₀"), "ours"))
    parts.append(box((90, 116), (150, 52), ("π', proximal", "forward pass, same θ₀"), "ours"))
    for update in range(4):
        weights = "₀₁₂₃"[update]
        parts.append(
            box((286 + 102 * update, 116), (82, 52), ("π, policy", f"update {update + 1}, θ{weights}"), "ours")
        )
        if update:
            parts.append(arrow((266 + 102 * update, 142), (285 + 102 * update, 142)))
    parts.append(arrow((240, 142), (285, 142)))
    parts += ['<path class="line out" d="M165 80V116"/>', text((176, 97), "k = π'/μ: engine mismatch", "soft", "start")]
    parts.append(arrow((633, 116), (633, 54), (530, 54)))
    parts.append(text((522, 58), "weight sync, then the next rollout", "soft", "end"))
    for update in range(1, 4):
        y = 176 + 18 * update
        parts.append(f'<path class="line in" d="M165 {y}H{327 + 102 * update}" stroke-width="{update}"/>')
        parts.append(f'<circle class="indot" cx="{327 + 102 * update}" cy="{y}" r="4"/>')
    parts.append('<path class="line in" d="M165 168V230"/>')
    parts.append(text((180, 188), "π/π': staleness, grows with each update", "soft", "start"))
    parts.append(box((90, 262), (150, 52), ("π_ref, reference", "for a KL penalty"), "ours"))
    parts.append(arrow((240, 288), (700, 288)))
    parts.append(text((470, 308), "does not change", "soft"))
    parts.append(text((360, 346), "A region's ratio is π/μ if its anchor is μ, and π/π' if its anchor is π'.", "name"))
    return svg(720, 364, "Four policies on a timeline of one rollout and four updates", parts)


ANCHOR, POLICY = (0.40, 0.35, 0.25), (0.70, 0.20, 0.10)
"""Distributions over three tokens, of which the first was sampled; the same as on the page."""

KL = 0.05
SIDE = 200.0


def corner_place(left: float, probabilities: Sequence[float]) -> Point:
    """Returns the place of a distribution in a triangle whose top is the sampled token."""
    top, _, second = probabilities
    return left + SIDE * (second + top / 2), 236 - SIDE * math.sqrt(3) / 2 * top


def kl(policy: Sequence[float]) -> float:
    """Returns KL(π‖b) in nats."""
    return sum(p * math.log(p / b) for p, b in zip(policy, ANCHOR, strict=True) if p > 0)


def ball() -> list[Sequence[float]]:
    """Returns the distributions at the edge of the KL ball around the anchor, found by bisection on rays."""
    edge = []
    for step in range(120):
        angle = math.tau * step / 120
        ray = [math.cos(angle - math.tau * corner / 3) for corner in range(3)]  # sums to 0
        inside, outside = 0.0, min(b / -r for b, r in zip(ANCHOR, ray, strict=True) if r < 0)
        for _ in range(50):
            middle = (inside + outside) / 2
            near = kl([b + middle * r for b, r in zip(ANCHOR, ray, strict=True)]) <= KL
            inside, outside = (middle, outside) if near else (inside, middle)
        edge.append([b + inside * r for b, r in zip(ANCHOR, ray, strict=True)])
    return edge


def projected() -> list[float]:
    """Returns TROLL's projection of the policy."""
    policy, anchor = (torch.tensor([values], dtype=torch.float64).log() for values in (POLICY, ANCHOR))
    return F.troll_project(policy, anchor, bound=KL).log_projected.exp()[0].tolist()


def strip(left: float, low: float, high: float) -> str:
    """Returns the part of the triangle in which the sampled token's probability lies between two bounds."""
    corners = [(low, 1 - low, 0.0), (low, 0.0, 1 - low), (high, 0.0, 1 - high), (high, 1 - high, 0.0)]
    return polygon([corner_place(left, corner) for corner in corners], "region")


def polygon(places: Sequence[Point], kind: str) -> str:
    """Returns a closed line."""
    return f'<polygon class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def clip_mask_project() -> str:
    """Returns three triangles: PPO's clip, DPPO's mask and TROLL's projection of the same policy."""
    clip, mask = PPO(), preset("dppo-binary-tv")
    assert isinstance(mask, DPPO)
    low, high = 1 - clip.ratio.max_decrease, 1 + clip.ratio.max_increase
    tv = mask.divergence.max_increase
    panels = (
        ("clip (PPO)", f"{low:g} ≤ π/b ≤ {high:g}", "pushed further out: gradient 0"),
        ("mask (DPPO, Binary TV)", f"|π − b| ≤ {tv:g}", "pushed further out: gradient 0"),
        ("project (TROLL)", f"KL(π‖b) ≤ {KL:g} nats", "outside: trains π̂ on the edge"),
    )
    b = ANCHOR[0]
    shapes = (
        lambda left: strip(left, low * b, high * b),
        lambda left: strip(left, b - tv, b + tv),
        lambda left: polygon([corner_place(left, edge) for edge in ball()], "region"),
    )
    parts = []
    for number, (name, rule, effect) in enumerate(panels):
        left = 20 + 240 * number
        middle = left + SIDE / 2
        parts += [text((middle, 24), name, "title"), text((middle, 262), rule), text((middle, 281), effect, "soft")]
        parts += panel(left, shapes[number], target=projected() if number == 2 else None)
    parts.append(
        text((360, 312), "Corners are three tokens. The top one was sampled: b gives it 0.40, the policy 0.70.", "soft")
    )
    return svg(720, 328, "Clip, mask and projection of one policy on the simplex of three tokens", parts)


def panel(left: float, shape: Callable[[float], str], target: Sequence[float] | None) -> list[str]:
    """Returns a triangle with a region, the anchor, the policy, and its projection if it has one."""
    corners = [corner_place(left, one) for one in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))]
    b, policy = corner_place(left, ANCHOR), corner_place(left, POLICY)
    parts = [shape(left), polygon(corners, "triangle")]
    if target is not None:
        end = corner_place(left, target)
        parts += [arrow(policy, end, kind="in"), f'<circle class="indot" cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="4"/>']
        parts.append(text((end[0] - 8, end[1] + 1), "π̂", "name", "end"))
    else:
        parts.append(f'<path class="line out dash" d="M{b[0]:.1f} {b[1]:.1f}L{policy[0]:.1f} {policy[1]:.1f}"/>')
    for (x, y), name, kind in ((b, "b", "dot"), (policy, "π", "outdot")):
        parts += [
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
            text((x + 9, y + 4), name, "name", "start"),
        ]
    return parts


STEPS = {
    "TRL": (
        ("vLLM", "records μ", False), ("rewards", "advantages", False), ("prepare", "top K, or π'", True),
        ("forward", "log-probs of π", False), ("policy_loss", "region, metrics", True),
        ("optimizer", "weight sync", False),
    ),
    "verl": (
        ("agent loops", "vLLM, SGLang", False), ("top K of μ", "as it decodes", True), ("rewards", "advantages", False),
        ("worker", "π' if needed", True), ("policy_loss", "region, metrics", True), ("optimizer", "weight sync", False),
    ),
    "asynchronous": (
        ("sampler", "never waits", False), ("version", "of each token", True), ("queue", "mixed versions", False),
        ("forward", "log-probs of π", False), ("policy_loss", "anchored on μ", True),
        ("optimizer", "new version", False),
    ),
}  # fmt: skip
"""Parts of a step, and whether they are trustrl's."""


def one_step() -> str:
    """Returns the steps of three kinds of trainers, with trustrl's parts marked."""
    parts = []
    for row, (engine, steps) in enumerate(STEPS.items()):
        y = 42 + 112 * row
        parts.append(text((14, y - 12), engine, "title", "start"))
        for place, (name, about, ours) in enumerate(steps):
            x = 14 + 119 * place
            parts.append(box((x, y), (103, 50), (name, about), "ours" if ours else "box"))
            if place:
                parts.append(arrow((x - 16, y + 25), (x - 1, y + 25)))
        end = 14 + 119 * 5 + 51
        parts.append(arrow((end, y + 50), (end, y + 70), (65, y + 70), (65, y + 51)))
    parts.append(box((14, 364), (22, 16), (), "ours"))
    parts.append(text((44, 377), "trustrl", "", "start"))
    parts.append(box((110, 364), (22, 16), ()))
    parts.append(text((140, 377), "the trainer's own, unchanged", "", "start"))
    return svg(720, 394, "The parts of trustrl in a step of TRL, of verl, and of an asynchronous trainer", parts)


def choice() -> str:
    """Returns the questions that lead to a region."""
    parts = [
        box((215, 16), (290, 46), ("How many updates on each rollout?", "and does the sampler match the trainer?")),
        box((14, 116), (200, 62), ("no region needed", "every ratio is 1: all regions", "are the same algorithm")),
        box(
            (260, 116),
            (200, 62),
            ("look for a fault first", "no arm differed from training", "without a region (20 seeds)"),
        ),
        box((506, 116), (200, 62), ("take a bounded weight", "it helped most", "in our study")),
        box((258, 226), (204, 46), ("Does the sampler record", "its top K?")),
    ]
    for x, words, start in (
        (114, "1, and it matches", 300),
        (360, "else, up to 4", 360),
        (606, "more, such as 16", 420),
    ):
        parts.append(arrow((start, 62), (x, 115)))
        parts.append(text((x + (46 if x == 360 else 0), 92 if x == 360 else 84), words, "soft", "middle"))
    parts += [arrow((360, 178), (360, 225)), arrow((606, 178), (606, 249), (463, 249))]
    parts.append(text((368, 206), "a region, if you want one", "soft", "start"))
    for x, name, words in ((130, TOP_K, "yes"), (390, SAMPLED_TOKEN, "no: the sampled token alone")):
        region = preset(name)
        assert isinstance(region, DPPO)
        about = f"δ = {region.divergence.max_increase:g}, weights at most {region.max_ratio:g}"
        parts.append(box((x, 326), (200, 46), (name, about), "ours"))
        parts.append(arrow((320 if x < 200 else 400, 272), (x + 100, 325)))
        parts.append(text((x + 40 if x < 200 else x + 78, 302), words, "soft", "end" if x < 200 else "start"))
    return svg(720, 390, "Questions that lead to a region", parts)


PICTURES = {
    "four-policies": four_policies, "clip-mask-project": clip_mask_project, "one-step": one_step, "choice": choice,
}  # fmt: skip


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
