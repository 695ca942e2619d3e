"""What fires, what does not, and what a dump then holds."""

import json

import pytest

pytest.importorskip("pyarrow")

import torch

import trustrl
from support import recording_batches as batches
from trustrl.errors import ConfigError, UnknownNameError
from trustrl.recording import EntropySlope, NonFinite, QuantileAbove, Recorder, Recording, read

QUIET = {"sample": 0.0, "ring_steps": 3}


def recorder(folder, *triggers, region=batches.REGION, **more):
    return Recorder(Recording(folder=folder, triggers=triggers, **QUIET | more), region, rank=0)


def true_quantile(b, of, share):
    on = b.rollout.in_loss
    log_ratio = (b.policy.logp.detach() - b.rollout.behavior_logp)[on].abs()
    return (b.out.decision.divergence.lower[on] if of == "divergence" else log_ratio).float().quantile(share).item()


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("of", ["divergence", "log_ratio"])
def test_a_quantile_fires_above_its_level_and_not_below(of, share, tmp_path):
    b = batches.batch(rows=64, length=64)
    truth = true_quantile(b, of, share)
    quiet = recorder(tmp_path / "quiet", QuantileAbove(of=of, quantile=share, level=truth * 1.2))
    assert batches.give(quiet, b) == []
    assert sorted(path.name for path in (tmp_path / "quiet").iterdir()) == ["run.json", "writers"]
    loud = recorder(tmp_path / "loud", QuantileAbove(of=of, quantile=share, level=truth / 1.2))
    (folder,) = batches.give(loud, b)
    (fired,) = json.loads((folder / "trigger.rank-0000.json").read_text())["fired"]
    assert fired["found"]["value"] == pytest.approx(truth, rel=0.13)


def test_a_fall_of_the_ratio_counts_as_much_as_a_rise(tmp_path):
    b = batches.batch(rows=64, length=64, at={...: -30.0})
    assert batches.give(recorder(tmp_path, QuantileAbove(of="log_ratio", quantile=0.5, level=10.0)), b)


@pytest.mark.parametrize(
    ("entropies", "trigger", "fires_at"),
    [
        pytest.param([2.0, 1.9, 1.8, 1.7, 1.6], EntropySlope(steps=3, max_fall=0.05), 2, id="falls"),
        pytest.param([2.0, 1.9, 1.8, 1.7, 1.6], EntropySlope(steps=3, max_fall=0.2), None, id="falls slowly"),
        pytest.param([2.0, 1.9, 1.8, 1.7, 1.6], EntropySlope(steps=3, max_rise=0.05), None, id="the other side"),
        pytest.param([1.0, 1.0, 1.0, 2.0, 3.0], EntropySlope(steps=3, max_rise=0.4), 3, id="rises"),
        pytest.param([1.0, 3.0, 1.0, 3.0, 1.0], EntropySlope(steps=5, max_rise=0.4, max_fall=0.4), None, id="wavers"),
        pytest.param([9.0, 1.0], EntropySlope(steps=3, max_fall=0.1), None, id="too few steps"),
    ],
)
def test_the_slope_of_the_entropy(entropies, trigger, fires_at, tmp_path):
    made, fired = recorder(tmp_path, trigger), []
    for step, entropy in enumerate(entropies):
        if batches.give(made, batches.batch(entropy=torch.full((8, 16), entropy)), step=step):
            fired.append(step)
    assert fired == ([] if fires_at is None else [fires_at])


def test_any_faulty_token_in_the_loss_fires(tmp_path):
    made = recorder(tmp_path, NonFinite())
    assert batches.give(made, batches.batch(at={(0, 1): float("nan")}), step=0) == []  # it is not in the loss
    (folder,) = batches.give(made, batches.batch(at={(0, 0): float("nan")}), step=1)
    about = json.loads((folder / "trigger.rank-0000.json").read_text())
    assert about["fired"] == [{"trigger": {"kind": "non-finite", "at_most_every": 100}, "found": {"policy": 1.0}}]


def test_a_dump_holds_the_last_steps_in_full(tmp_path):
    made = recorder(tmp_path, NonFinite())
    steps = {step: [batches.batch(seed=step), batches.batch(seed=step + 50, first=8)] for step in range(5)}
    steps[4][1] = batches.batch(seed=54, first=8, at={(0, 0): float("nan")})
    for step, parts in steps.items():
        dumps = batches.give(made, *parts, step=step)
        assert bool(dumps) == (step == 4)
    found = read(dumps[0])
    assert found["step"].unique().tolist() == [2, 3, 4]
    for step in (2, 3, 4):
        expected = torch.cat([b.policy.logp.detach()[b.rollout.in_loss] for b in steps[step]])
        assert torch.equal(found["policy_logp"][found["step"] == step].nan_to_num(7.0), expected.nan_to_num(7.0))
    about = json.loads((dumps[0] / "trigger.rank-0000.json").read_text())
    assert {name: part["left_off"] for name, part in about["steps"].items()} == {"2": 0, "3": 0, "4": 0}
    assert trustrl.config_from_dict(about["region"]) == batches.REGION


def test_a_trigger_rests_after_it_has_fired_and_dumps_are_bounded(tmp_path):
    bad = batches.batch(at={(0, 0): float("nan")})
    made = recorder(tmp_path / "rests", NonFinite(at_most_every=4))
    assert [step for step in range(10) if batches.give(made, bad, step=step)] == [0, 4, 8]
    made = recorder(tmp_path / "few", NonFinite(at_most_every=1), max_dumps=2)
    assert [step for step in range(5) if batches.give(made, bad, step=step)] == [0, 1]
    made = recorder(tmp_path / "two", NonFinite(at_most_every=3), QuantileAbove(of="divergence", level=0.0))
    assert [step for step in range(4) if batches.give(made, bad, step=step)] == [0, 3]
    about = json.loads((tmp_path / "two/dump-00000000/trigger.rank-0000.json").read_text())
    assert [fired["trigger"]["kind"] for fired in about["fired"]] == ["non-finite", "quantile-above"]


def test_the_ring_keeps_to_its_bytes(tmp_path):
    one = batches.batch(rows=32, length=64)
    made = recorder(tmp_path / "measured", ring_steps=100)
    batches.give(made, one, step=0)
    size = made.ring.nbytes
    tokens = int(one.rollout.in_loss.sum())
    assert size == tokens * (7 * 4 + 1 + 4 * 4 + 8)  # floats, kept, four int32, sequence
    made = recorder(tmp_path, NonFinite(), ring_steps=100, ring_bytes=int(2.5 * size))
    for step in range(6):
        batches.give(made, one, step=step)
        assert made.ring.nbytes <= 2.5 * size
    assert [step for step, _ in made.ring.steps()] == [4, 5]
    bad = batches.batch(rows=32, length=64, at={(0, 0): float("nan")})
    (folder,) = batches.give(made, bad, one, one, step=6)  # a step too large for the ring
    assert made.ring.nbytes <= 2.5 * size
    about = json.loads((folder / "trigger.rank-0000.json").read_text())
    assert about["steps"] == {"6": {"rows": 2 * tokens, "left_off": tokens}}


def test_settings_travel_as_a_dictionary():
    settings = Recording(
        folder="here", sample=0.5,
        triggers=(QuantileAbove(of="log_ratio", level=2.0), EntropySlope(max_fall=0.1), NonFinite(at_most_every=5)),
    )  # fmt: skip
    plain = json.loads(json.dumps(trustrl.config_to_dict(settings)))
    assert Recording.of(plain) == settings
    assert trustrl.config_from_dict(plain) == settings


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"smaple": 0.1}, ConfigError, "Did you mean 'sample'"),
        ({"sample": 1.5}, ConfigError, r"recording.sample must be a share in \[0, 1\], got 1.5"),
        ({"sample": -0.1}, ConfigError, "recording.sample"),
        ({"folder": ""}, ConfigError, "recording.folder"),
        ({"ring_steps": 1.5}, ConfigError, "recording.ring_steps"),
        ({"ring_bytes": 0}, ConfigError, "recording.ring_bytes"),
        ({"max_rows_per_step": 0}, ConfigError, "recording.max_rows_per_step"),
        ({"max_dumps": -1}, ConfigError, "recording.max_dumps"),
        ({"topk": 3}, ConfigError, "recording.topk"),
        ({"triggers": "non-finite"}, ConfigError, "recording.triggers"),
        ({"triggers": [{"kind": "ppo"}]}, ConfigError, "recording.triggers must contain triggers"),
        ({"triggers": [{"kind": "non-finit"}]}, UnknownNameError, "Did you mean 'non-finite'"),
        ({"triggers": [{"kind": "non-finite", "at_most_evry": 3}]}, ConfigError, "Did you mean 'at_most_every'"),
        ({"triggers": [{"kind": "non-finite", "at_most_every": 0}]}, ConfigError, "at_most_every"),
        ({"triggers": [{"kind": "entropy-slope"}]}, ConfigError, "max_fall or max_rise"),
        ({"triggers": [{"kind": "entropy-slope", "max_fall": -1}]}, ConfigError, "entropy-slope.max_fall"),
        ({"triggers": [{"kind": "entropy-slope", "max_fall": 1, "steps": 1}]}, ConfigError, "entropy-slope.steps"),
        ({"triggers": [{"kind": "quantile-above", "of": "log_ratio"}]}, ConfigError, "must be given level"),
        ({"triggers": [{"kind": "quantile-above", "of": "ratio", "level": 1}]}, ConfigError, "quantile-above.of"),
        ({"kind": "ppo"}, ConfigError, "ppo has no setting 'folder'"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(given, error, says):
    with pytest.raises(error, match=says):
        Recording.of({"folder": "here", **given})


def test_triggers_without_a_ring_are_refused():
    with pytest.raises(ConfigError, match="ring_steps"):
        Recording(folder="here", ring_steps=0)
