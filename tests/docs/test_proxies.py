"""The proxy study: its divergences against brute force, its raw data, and numbers of its page computed another way."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs/results/data/proxies", ROOT / "docs/results/k-proxies.md"
MODELS = ("smollm2-135m", "verses", "code")
KS = (1, 2, 4, 8, 16, 20, 32, 64, 256, 1024)


@pytest.fixture(scope="module", autouse=True)
def _study():
    global proxy_data, proxy_run, proxy_stats, proxy_theory
    sys.path.insert(0, str(ROOT / "studies/05-which-statistic"))
    import proxy_data
    import proxy_run
    import proxy_stats
    import proxy_theory


def rows(name, arm, update):
    """Divergences and sampled tokens of one arm, read without the study's code."""
    tokens, moves = (pq.read_table(DATA / f"{name}-{end}.parquet").to_pydict() for end in ("tokens", arm))
    tokens, moves = ({k: np.array(v) for k, v in table.items()} for table in (tokens, moves))
    at = moves["update"] == update
    moves = {key: values[at] for key, values in moves.items()}
    assert (moves["batch"] == tokens["batch"]).all()
    return tokens | moves


def block(name):
    pages = "".join(page.read_text() for page in (PAGE, PAGE.with_name("k-proxies-tables.md")))
    (found,) = re.findall(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", pages, re.S)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found.split("\n") if "|" in line]


def ranks(values):
    """Ranks with ties at their mean."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def test_the_study_s_divergences_are_the_sums_over_cells():
    generator = torch.Generator().manual_seed(0)
    log_mu, log_pi = torch.log_softmax(3 * torch.randn(2, 5, 1500, generator=generator, dtype=torch.float64), -1)
    token = torch.tensor([0, 7, 900, 1499, 3])
    top = log_mu.topk(max(KS), -1).indices
    token[0] = top[0, 10]  # among the 16 most probable and not among the 8
    found = proxy_run.divergences(log_mu, log_pi, token, top)
    for i in range(5):
        mu, pi = log_mu[i].exp().numpy(), log_pi[i].exp().numpy()
        assert found["tv_exact"][i] == pytest.approx(np.abs(mu - pi).sum() / 2)
        assert found["log_ratio"][i] == pytest.approx(np.log(pi[token[i]] / mu[token[i]]))
        for k in (1, 8, 16, 1024):
            cells = sorted({*np.argsort(-mu)[:k].tolist(), int(token[i])})
            b, p = (np.append(x[cells], 1 - x[cells].sum()) for x in (mu, pi))
            assert found[f"tv_{k}"][i] == pytest.approx(np.abs(b - p).sum() / 2)
            assert found[f"kl_{k}"][i] == pytest.approx((b * np.log(b / p)).sum())


@pytest.mark.parametrize("name", MODELS)
def test_merging_cells_never_adds_divergence(name):
    for update in (1, 16):
        d = rows(name, "none", update)
        binary = np.abs(np.exp(d["log_mu"]) * np.expm1(d["log_ratio"]))
        columns = [binary, *(d[f"tv_{k}"] for k in KS), d["tv_exact"]]
        for smaller, larger in pairwise(columns):
            assert (smaller <= larger * 1.001 + 1e-6).all()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_20_batches_without_a_region(name):
    d = rows(name, "none", 4)
    assert len(np.unique(d["batch"])) == 20
    assert (d["advantage"] > 0).any()
    assert (d["advantage"] < 0).any()


@pytest.mark.parametrize("name", MODELS)
def test_the_rank_table_follows_from_the_raw_data(name):
    d = rows(name, "none", 4)
    statistics = {
        "\\|log r\\|": np.abs(d["log_ratio"]),
        "Binary TV": np.abs(np.exp(d["log_mu"]) * np.expm1(d["log_ratio"])),
        "Top-20 TV": d["tv_20"],
        "−log μ(a)": -d["log_mu"],
    }
    head, _, *table = block("ranks")
    said = {row[0]: float(row[head.index(f"`{name}`")].split()[0]) for row in table}
    for label, values in statistics.items():
        found = [
            np.corrcoef(ranks(values[d["batch"] == batch]), ranks(d["tv_exact"][d["batch"] == batch]))[0, 1]
            for batch in np.unique(d["batch"])
        ]
        assert np.mean(found) == pytest.approx(said[label], abs=0.0051)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_at_a_matched_rate_follows_from_the_raw_data(name):
    d = rows(name, "none", 4)
    head, _, *table = block("matched")
    at = head.index(f"`{name}`: mean TV of flagged")
    said = {row[0]: float(row[at].split()[0]) for row in table}
    for label, values in (("\\|log r\\|", np.abs(d["log_ratio"])), ("Top-20 TV", d["tv_20"])):
        found = []
        for batch in np.unique(d["batch"]):
            here, tv = values[d["batch"] == batch], d["tv_exact"][d["batch"] == batch]
            found.append(tv[np.argsort(here)[::-1][: round(0.05 * len(tv))]].mean())
        assert np.mean(found) == pytest.approx(said[label], abs=0.00051)


def test_every_statistic_flags_the_same_number_of_tokens():
    one = proxy_data.batches("verses", "none", 4)[0]
    for rate in proxy_stats.RATES:
        sizes = {
            len(proxy_stats.flagged(one, s, rate)) for s in ("log_r", "tv_binary", "tv_20", "surprise", "tv_exact")
        }
        assert sizes == {max(1, round(rate * len(one["log_mu"])))}
    among = proxy_stats.flagged(one, "log_r", 0.1, proxy_stats.outward)
    assert (one["advantage"] * one["log_ratio"])[among].min() > 0


def test_the_tests_are_the_24_of_the_protocol_and_holm_never_lowers_a_p_value():
    found = proxy_stats.tests()
    assert len(found) == 24
    assert all(one["holm"] >= one["p"] and one["batches"] == 20 for one in found.values())
    assert "2 × 4 × 3 = 24" in (PAGE.with_name("k-protocol.md")).read_text()


def test_binary_tv_is_exact_if_only_the_sampled_token_is_pushed_and_the_ratio_ranks_better_under_noise():
    push, noise = proxy_theory.simulated(None), proxy_theory.simulated(0.0)
    assert push["tv_binary"] == pytest.approx(1)
    assert push["share"] == pytest.approx(1)
    assert noise["log_r"] > noise["tv_binary"] + 0.3
