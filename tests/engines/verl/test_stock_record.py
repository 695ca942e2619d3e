"""verl's own loss in a real worker, recorded: the same gradients and weights bit for bit, and what the loss got."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

import torch

import trustrl
from support import regions_oracle as oracle
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of
from trustrl.engines.common.stock_tokens import FOLDER, REGION, SAMPLE, observed_region, recording
from trustrl.errors import ConfigError
from trustrl.recording import read, read_run, read_sequences, read_texts

RANKS, STEPS, UPDATES = 2, 2, 6

pytestmark = pytest.mark.xdist_group("stock record of a worker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What both ranks saved, and their records."""
    if version_of("verl") < (0, 9, 1):
        pytest.skip("verl 0.9.0's workers need flash-attention")
    folder = tmp_path_factory.mktemp("stock")
    on_ranks("verl_stock_record.py", RANKS, oracle.tiny_model(folder), folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(RANKS)]


def same(a, b):
    gradients = all(torch.equal(x, y) for x, y in zip(a["gradients"], b["gradients"], strict=True))
    return gradients and torch.equal(a["weights"], b["weights"]) and a["metrics"] == b["metrics"]


@pytest.mark.parametrize("how", ["ours", "recorded", "observed"])
def test_training_is_verls_own_bit_for_bit(how, found):
    for one in found:
        assert len(one["verl"]["gradients"]) == STEPS * UPDATES
        assert same(one[how], one["verl"])


def test_the_comparison_would_see_a_last_bit(found):
    assert not any(same(one["perturbed"], one["verl"]) for one in found)


def test_each_rank_records_what_verls_loss_got(folder, found):
    every = read(folder / "records")
    assert not {"kept", "weight", "divergence_lower"} & set(every)
    columns = {"policy_logp": "log_prob", "proximal_logp": "old_log_prob", "advantage": "advantages"}
    for rank, one in enumerate(found):
        here = every["rank"] == rank
        for column, name in columns.items():
            assert torch.equal(every[column][here], one["recorded"]["seen"][name]), column
        batch = oracle.batch(str(folder), rank)
        first = here & (every["step"] == 1) & (every["update"] < UPDATES // 2)
        expected = batch.behavior_logp[batch.in_loss]
        assert torch.equal(every["behavior_logp"][first].sort().values, expected.sort().values)
        assert every["update"][here].unique().tolist() == list(range(UPDATES))
        assert every["step"][here].unique().tolist() == [1, 2]
        assert torch.equal(every["token_id"][first].sort().values, batch.responses[batch.in_loss].int().sort().values)
        assert every["entropy"][here].isfinite().all()


def test_sequences_carry_what_the_trainer_knows(folder):
    rows = read_sequences(folder / "records").to_pylist()
    texts = {row["sequence"]: row for row in read_texts(folder / "records").to_pylist()}
    tokens = read(folder / "records")
    per_rank = len(rows) // (RANKS * STEPS)
    assert {row["task_id"] for row in rows} == {f"sums/{row}" for row in range(per_rank)}
    for row in rows:
        index = int(row["task_id"].partition("/")[2])
        batch = oracle.batch(str(folder), row["rank"])
        assert row["reward"] == pytest.approx(index / per_rank + row["rank"])
        assert dict(row["rewards"]) == {"right": index % 2}, "numbers only"
        assert row["prompt_tokens"] == batch.prompts.shape[1]
        assert row["completion_tokens"] == batch.in_sequence[index].sum()
        assert row["advantage"] == (batch.advantages[index, 0].item() if batch.in_loss[index].any() else None)
        assert row["stop_reason"] == "length"
        assert texts[row["sequence"]]["prompt"]
        trained = tokens["token_id"][tokens["sequence"] == row["sequence"]]
        assert len(trained) == 2 * batch.in_loss[index].sum(), "two epochs"
    groups = {(row["step"], row["rank"], int(row["task_id"].partition("/")[2]) // 2): row["group"] for row in rows}
    assert len(set(groups.values())) == len(groups) == len(rows) // 2


def test_a_region_that_observes_decides_as_it_would_have(folder):
    every = read(folder / "observed")
    rollout = trustrl.RolloutTokens(
        behavior_logp=every["behavior_logp"], advantage=every["advantage"],
        in_loss=torch.ones_like(every["kept"]), sequence_ids=every["sequence"],
    )  # fmt: skip
    region = trustrl.preset("dppo-binary-tv")
    policy = trustrl.PolicyTokens(logp=every["policy_logp"])
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenMean(num_tokens=1))
    assert torch.equal(out.decision.keep, every["kept"])
    assert 0 < every["kept"].sum() < len(every["kept"])
    about = read_run(folder / "observed")
    assert (about["region_role"], about["region"]["kind"]) == ("observed", "dppo")
    assert about["engine"]["settings"]["loss"] == "vanilla"
    assert about["dtypes"]["trainer"] == "float32"
    assert read_run(folder / "records")["region_role"] is None


def test_without_the_variable_nothing_is_recorded(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    assert recording() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({SAMPLE: "0.1"}, r"TRUSTRL_RECORD must be set with TRUSTRL_RECORD_SAMPLE"),
        ({FOLDER: "records", SAMPLE: "all"}, r"TRUSTRL_RECORD_SAMPLE must be a number in \[0, 1\], got 'all'"),
        ({FOLDER: "records", SAMPLE: "2"}, r"TRUSTRL_RECORD_SAMPLE must be a number in \[0, 1\], got '2'"),
        ({FOLDER: "records", REGION: "troll"}, r"only the sampled token"),
    ],
)
def test_variables_that_do_not_fit_are_refused(given, says, monkeypatch):
    for name in (FOLDER, SAMPLE, REGION):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        _ = recording(), observed_region()


def test_the_default_share_is_all_of_a_small_batch(monkeypatch):
    monkeypatch.setenv(FOLDER, "records")
    monkeypatch.delenv(SAMPLE, raising=False)
    assert [recording(rows).sample for rows in (16, 64, 100_000, None)] == [1.0, 0.5, 0.01, 0.01]
