"""What the answer should be, by brute force: plain Python and numpy in float64, written from the papers' equations.

Nothing of trustrl is imported here. Every function takes plain probabilities or log-probs and loops where a loop is
clearest. The outside anchors of the oracle itself (scipy, torch.distributions) are in test_oracle.py.
"""

import math

import numpy as np

# ── divergences; b and p are whole distributions over the vocabulary ────────────────────────────────────────────────


def tv(b, p):
    return 0.5 * float(np.sum(np.abs(np.asarray(b) - np.asarray(p))))


def kl(b, p):
    total = 0.0
    for x, y in zip(b, p, strict=True):
        if x > 0:
            total += math.inf if y <= 0 else x * math.log(x / y)
    return max(total, 0.0)


def kl_fast(b, p):
    """The same for large vocabularies, where every entry is positive."""
    b, p = np.asarray(b, np.float64), np.asarray(p, np.float64)
    return max(float(np.sum(b * (np.log(b) - np.log(p)))), 0.0)


def merged(b, p, ids):
    """Both distributions with every id outside `ids` merged into one last cell."""
    b, p = np.asarray(b, np.float64), np.asarray(p, np.float64)
    rest = np.ones(len(b), bool)
    rest[list(ids)] = False
    return np.append(b[~rest], b[rest].sum()), np.append(p[~rest], p[rest].sum())


def support(b, sampled, k):
    """TopK(b, k) ∪ {sampled}."""
    top = np.argsort(-np.asarray(b), kind="stable")[:k]
    return {*top.tolist(), int(sampled)}


def binary(b, p, sampled):
    return merged(b, p, {int(sampled)})


def tv_interval(b, p, ids):
    """The certified interval: exact on the ids, worst case outside."""
    cells_b, cells_p = merged(b, p, ids)
    on = np.abs(cells_b[:-1] - cells_p[:-1]).sum()
    m, q = cells_b[-1], cells_p[-1]
    return 0.5 * (on + abs(m - q)), 0.5 * (on + m + q)


# ── what each region multiplies A·∇log π with: M·w, per token ───────────────────────────────────────────────────────


def away(distance, r, advantage, low, high):
    return (advantage > 0 and r > 1 and distance > high) or (advantage < 0 and r < 1 and distance > low)


def symmetric(distance, r, low, high):
    return (r > 1 and distance > high) or (r < 1 and distance > low)


def binary_kl(b, p):
    def term(x, y):
        return 0.0 if x <= 0 else math.inf if y <= 0 else x * math.log(x / y)

    return max(term(b, p) + term(1 - b, 1 - p), 0.0)


class Case:
    """One batch in numpy: rows are sequences."""

    def __init__(self, log_b, log_p, advantage, in_loss, log_proximal, full_b, full_p, tokens, k):
        self.log_b, self.log_p, self.log_proximal = log_b, log_p, log_proximal
        self.advantage, self.in_loss = advantage, in_loss
        self.full_b, self.full_p, self.tokens, self.k = full_b, full_p, tokens, k

    def divergence(self, name, i, t):
        b, p, token = self.full_b[i, t], self.full_p[i, t], self.tokens[i, t]
        if name.startswith("binary"):
            x, y = math.exp(self.log_b[i, t]), math.exp(self.log_p[i, t])
            return abs(x - y) if name.endswith("tv") else binary_kl(x, y)
        ids = range(len(b)) if name.startswith("full") else support(b, token, self.k)
        cells = merged(b, p, ids)
        return tv(*cells) if name.endswith("tv") else kl(*cells)


def factors(name, case):
    """M·w per token for a preset at its published defaults."""
    if name in WHOLE:
        return WHOLE[name](case)
    out = np.zeros_like(case.log_b)
    for i in range(out.shape[0]):
        row = [t for t in range(out.shape[1]) if case.in_loss[i, t]]
        if row:
            for t, value in zip(row, ROWS[name.split(":")[0]](case, i, row), strict=True):
                out[i, t] = value
    return out


def _ratios(case, i, row):
    return [math.exp(case.log_p[i, t] - case.log_b[i, t]) for t in row]


def _dppo(divergence, bound, cap=math.inf):
    def rule(case, i, row):
        result = []
        for t, r in zip(row, _ratios(case, i, row), strict=True):
            stop = away(case.divergence(divergence, i, t), r, case.advantage[i, t], bound, bound)
            result.append(0.0 if stop else min(r, cap))
        return result

    return rule


def _ppo(case, i, row):
    return [
        0.0 if away(abs(r - 1), r, case.advantage[i, t], 0.2, 0.28) else r
        for t, r in zip(row, _ratios(case, i, row), strict=True)
    ]


def _gspo(case, i, row):
    s = math.exp(sum(case.log_p[i, t] - case.log_b[i, t] for t in row) / len(row))
    return [0.0 if away(abs(s - 1), s, case.advantage[i, t], 3e-4, 4e-4) else s for t in row]


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


def _sapo(case, i, row):
    result = []
    for t, r in zip(row, _ratios(case, i, row), strict=True):
        x = (1.0 if case.advantage[i, t] > 0 else 1.05) * (r - 1)
        result.append(4 * r * _sigmoid(x) * _sigmoid(-x))
    return result


def _spo(case, i, row):
    return [
        r * (1 - np.sign(case.advantage[i, t]) * (r - 1) / 0.2) for t, r in zip(row, _ratios(case, i, row), strict=True)
    ]


def _drpo(case, i, row):
    result = []
    for t, r in zip(row, _ratios(case, i, row), strict=True):
        gap = math.exp(case.log_p[i, t]) - math.exp(case.log_b[i, t])
        result.append(r * (1 - np.sign(case.advantage[i, t]) * gap / 0.2))
    return result


def _cppo(case, i, row):
    distances = [case.divergence("topk-tv", i, t) for t in row]
    rate = min(max(float(np.quantile(distances, 0.9)), 0.02), 0.04)
    spent = weight_sum = 0.0
    result = []
    for place, (t, r) in enumerate(zip(row, _ratios(case, i, row), strict=True)):
        weight = 1 - 0.2 * place / max(len(row) - 1, 1)
        cost = weight * distances[place]
        limit = min(0.15, 0.15 + rate * weight_sum - spent)
        result.append(r if case.advantage[i, t] * (r - 1) <= 0 or cost <= limit else 0.0)
        spent, weight_sum = spent + cost, weight_sum + weight
    return result


def _symmetric(distance, bound):
    def rule(case, i, row):
        return [
            0.0 if symmetric(distance(case, i, t), r, bound, bound) else r
            for t, r in zip(row, _ratios(case, i, row), strict=True)
        ]

    return rule


def _kpop_distance(case, i, t):
    b, p = math.exp(case.log_b[i, t]), math.exp(case.log_p[i, t])
    return max(binary_kl(b, p), binary_kl(p, b))


def _trm(distance):
    def rule(case, i, row):
        dropped = max(distance(case, i, t) for t in row) > 0.05
        # A token with A = 0 is never counted as stopped, and has no gradient either way.
        return [
            0.0 if dropped and case.advantage[i, t] != 0 else r for t, r in zip(row, _ratios(case, i, row), strict=True)
        ]

    return rule


def _corrected(correction):
    """PPO around π', times a factor of the token's k = π'/μ."""

    def rule(case, i, row):
        result = []
        for t in row:
            r = math.exp(case.log_p[i, t] - case.log_proximal[i, t])
            k = math.exp(case.log_proximal[i, t] - case.log_b[i, t])
            stop = away(abs(r - 1), r, case.advantage[i, t], 0.2, 0.28)
            result.append(0.0 if stop else r * correction(k))
        return result

    return rule


def _minirl(case, i, row):
    result = []
    for t in row:
        drift = math.exp(case.log_p[i, t] - case.log_proximal[i, t])
        stop = away(abs(drift - 1), drift, case.advantage[i, t], 0.2, 0.28)
        result.append(0.0 if stop else math.exp(case.log_p[i, t] - case.log_b[i, t]))
    return result


def _dppo_decoupled(case, i, row):
    """Figure 4's ablation: the mask on |π − π'|, the weight π/μ."""
    result = []
    for t in row:
        p, start, sampled = (math.exp(x[i, t]) for x in (case.log_p, case.log_proximal, case.log_b))
        stop = away(abs(p - start), p / start, case.advantage[i, t], 0.15, 0.15)
        result.append(0.0 if stop else p / sampled)
    return result


def _by_row(factor):
    """PPO around π', times factor(case, i, row, t)."""

    def rule(case, i, row):
        plain = _corrected(lambda k: 1.0)(case, i, row)
        return [x * factor(case, i, row, t) for t, x in zip(row, plain, strict=True)]

    return rule


def _product(case, i, row):
    k = 1.0
    for t in row:
        k *= math.exp(case.log_proximal[i, t] - case.log_b[i, t])
    return k


def _divergence_gate(case, i, row, t):
    """k if the row's mean binary KL(μ‖π') is at most 3e-3."""
    gaps = [binary_kl(math.exp(case.log_b[i, s]), math.exp(case.log_proximal[i, s])) for s in row]
    return math.exp(case.log_proximal[i, t] - case.log_b[i, t]) if sum(gaps) / len(gaps) <= 3e-3 else 0.0


def _flash_reinforce(case, i, row):
    """The same gate on KL(μ‖π), weight π/μ."""
    gaps = [binary_kl(math.exp(case.log_b[i, s]), math.exp(case.log_p[i, s])) for s in row]
    keep = sum(gaps) / len(gaps) <= 3e-3
    return [r if keep else 0.0 for r in _ratios(case, i, row)]


def _gmpo(case, i, row):
    total, inside = 0.0, []
    for t in row:
        d, a = case.log_p[i, t] - case.log_b[i, t], case.advantage[i, t]
        clipped = min(d, 0.4) if a > 0 else max(d, -0.4) if a < 0 else d
        inside.append(clipped == d)
        total += clipped
    return [math.exp(total / len(row)) if one else 0.0 for one in inside]


def _opsm(case, i, row):
    drift = sum(case.log_b[i, t] - case.log_p[i, t] for t in row) / len(row)
    return [
        0.0 if case.advantage[i, t] < 0 and drift > 0.5 else x for t, x in zip(row, _ppo(case, i, row), strict=True)
    ]


def _vespo(case, i, row):
    w = math.prod(_ratios(case, i, row))
    result = []
    for t in row:
        k, decay = (2.0, 3.0) if case.advantage[i, t] >= 0 else (3.0, 2.0)
        result.append(math.exp(decay) * w**k * math.exp(-decay * w))
    return result


def _m2po(case):
    """All rows at once: algorithm 1, one token at a time."""
    tokens = [(i, t) for i, t in zip(*np.nonzero(case.in_loss), strict=True)]
    ratio = {at: math.exp(case.log_p[at] - case.log_b[at]) for at in tokens}
    trusted = [at for at in tokens if case.advantage[at] * (ratio[at] - 1) > 0]
    square = {at: (case.log_p[at] - case.log_b[at]) ** 2 for at in trusted}
    out = np.zeros_like(case.log_b)
    for at in tokens:
        out[at] = ratio[at]
    while trusted and sum(square[at] for at in trusted) / len(trusted) > 0.04:
        worst = max(trusted, key=square.get)
        out[worst] = 0.0
        trusted.remove(worst)
    return out


WHOLE = {"m2po": _m2po}
"""Rules that read the whole batch."""

ROWS = {
    "dppo-minimal": lambda case, i, row: [
        0.0 if case.advantage[i, t] < 0 and math.exp(case.log_b[i, t]) - math.exp(case.log_p[i, t]) > 0.5 else r
        for t, r in zip(row, _ratios(case, i, row), strict=True)
    ],
    "tis-product": _by_row(lambda case, i, row, t: min(_product(case, i, row), 3.0)),
    "mis-product": _by_row(lambda case, i, row, t: k if (k := _product(case, i, row)) <= 3.0 else 0.0),
    "divergence-gate": _by_row(_divergence_gate),
    "flash-reinforce": _flash_reinforce,
    "dis": lambda case, i, row: [r if 0.7 <= r <= 6.0 else 0.0 for r in _ratios(case, i, row)],
    "ppo-relaxed": lambda case, i, row: [
        r if math.exp(case.log_b[i, t]) < 0.1 else x
        for t, r, x in zip(row, _ratios(case, i, row), _ppo(case, i, row), strict=True)
    ],
    "gmpo": _gmpo,
    "opsm": _opsm,
    "vespo": _vespo,
    "dppo-decoupled": _dppo_decoupled,
    "dppo-binary-tv": _dppo("binary-tv", 0.15),
    "dppo-binary-kl": _dppo("binary-kl", 0.05),
    "dppo-topk-tv": _dppo("topk-tv", 0.15),
    "dppo-topk-kl": _dppo("topk-kl", 0.05),
    "dppo-binary-tv-scaling": _dppo("binary-tv", 0.2, cap=5.0),
    "dppo-binary-kl-scaling": _dppo("binary-kl", 0.05, cap=5.0),
    "dppo-topk-tv-scaling": _dppo("topk-tv", 0.2, cap=5.0),
    "dppo-topk-kl-scaling": _dppo("topk-kl", 0.05, cap=5.0),
    "dppo-binary-tv-capped": _dppo("binary-tv", 0.3, cap=2.0),
    "dppo-topk-tv-capped": _dppo("topk-tv", 0.3, cap=2.0),
    "dppo-full-tv": _dppo("full-tv", 0.15),
    "dppo-full-kl": _dppo("full-kl", 0.05),
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": lambda case, i, row: [min(r, 5.0) for r in _ratios(case, i, row)],
    "sapo": _sapo,
    "spo": _spo,
    "drpo": _drpo,
    "cppo": _cppo,
    "ipo": _symmetric(lambda case, i, t: case.divergence("binary-tv", i, t), 0.3),
    "kpop": _symmetric(_kpop_distance, 2.0),
    "trm": _trm(lambda case, i, t: case.divergence("topk-kl", i, t)),
    "trm-full-kl": _trm(lambda case, i, t: case.divergence("full-kl", i, t)),
    "trm-sampled": _trm(lambda case, i, t: 0.5 * (case.log_p[i, t] - case.log_b[i, t]) ** 2),
    "tis": _corrected(lambda k: min(k, 2.0)),
    "icepop": _corrected(lambda k: k if 0.5 <= k <= 5.0 else 0.0),
    "mis": _corrected(lambda k: k if 0.5 <= k <= 2.0 else 0.0),
    "minirl": _minirl,
    "pg-is": _ratios,
}


# ── TROLL by a general-purpose solver ───────────────────────────────────────────────────────────────────────────────


def troll_projection(log_p, log_b, bound):
    """argmin_q KL(q‖p) s.t. KL(q‖b) ≤ bound, by bisection on the multiplier η in 80-digit-safe float64 steps.

    Written in η, not in β as the library does: q ∝ p^{1/(1+η)} b^{η/(1+η)}.
    """
    log_p, log_b = np.asarray(log_p, np.float64), np.asarray(log_b, np.float64)

    def q_of(eta):
        logits = (log_p + eta * log_b) / (1 + eta)
        logits = logits - logits.max()
        return logits - math.log(np.exp(logits).sum())

    def excess(log_q):
        return float(np.sum(np.exp(log_q) * (log_q - log_b))) - bound

    if excess(log_p) <= bound * 1e-4:
        return log_p
    low, high = 0.0, 1.0
    while excess(q_of(high)) > 0:
        high *= 4
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(q_of(middle)) > 0 else (low, middle)
    return q_of(0.5 * (low + high))


# ── score centering: the gradient by the logits, from the sampler's expectation written out ─────────────────────────


def centered_gradient(b, p, sampled, advantage, k, f=lambda r: 1.0):
    """∂ℓ/∂logits = −A·(f(r_a)·(e_a − p) − Σ_v m_v·(e_v − p)), with b modelled as ρ·p outside its k most probable ids."""
    head = np.argsort(-np.asarray(b), kind="stable")[:k]
    rho = (1 - sum(b[v] for v in head)) / (1 - sum(p[v] for v in head)) if k < len(b) else 0.0
    total = np.zeros(len(p))
    for v in range(len(p)):
        score = -np.asarray(p, np.float64)
        score[v] += 1
        if v == sampled:
            total += f(p[v] / b[v]) * score
        total -= (b[v] * f(p[v] / b[v]) if v in head else rho * f(1 / rho) * p[v]) * score
    return -advantage * total
