"""The second study: its world, its plan, and its verdicts on data with a known answer."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

scipy = pytest.importorskip("scipy")

import trustrl

ROOT = Path(__file__).parents[2]
QUESTIONS = (("first", "b", "a"), ("second", "c", "a"))


@pytest.fixture(scope="module", autouse=True)
def _modules():
    """Imports the scripts for the first test."""
    global run, study, synonym_training, synonym_world, verdicts
    sys.path.insert(0, str(ROOT / "studies/02-which-learns-most"))
    import run
    import study
    import synonym_training
    import synonym_world
    import verdicts


def planted(seed, seeds=60, noise=0.02, **effects):
    """Areas of arms that share their seed's luck, `a` without an effect."""
    random = np.random.default_rng(seed)
    luck = random.normal(0.3, 0.05, seeds)
    return {
        arm: dict(enumerate(luck + effect + random.normal(0, noise, seeds)))
        for arm, effect in {"a": 0.0, **effects}.items()
    }


def test_a_planted_effect_is_found_with_its_sign():
    found = verdicts.answers(planted(1, b=0.05, c=-0.05), QUESTIONS)
    assert [one.verdict for one in found] == ["ahead", "behind"]
    assert found[0].low < 0.05 < found[0].high


@pytest.mark.long
def test_arms_without_an_effect_are_equal_within_the_margin_or_undecided_and_rarely_ahead():
    said = [one.verdict for seed in range(200) for one in verdicts.answers(planted(seed, b=0.0, c=0.0), QUESTIONS)]
    assert said.count("equal within 0.02") > 0.8 * len(said)
    four = (*QUESTIONS, ("third", "d", "a"), ("fourth", "e", "d"))
    noisy = [verdicts.answers(planted(seed, noise=0.2, b=0.0, c=0.0, d=0.0, e=0.0), four) for seed in range(200)]
    wrong = sum(any(one.verdict in ("ahead", "behind") for one in family) for family in noisy)
    assert wrong <= 0.05 * 200 + 2 * (200 * 0.05 * 0.95) ** 0.5
    assert sum(one.verdict == "equal within 0.02" for family in noisy for one in family) == 0


@pytest.mark.long
def test_an_effect_of_the_margin_is_called_equal_in_at_most_5_percent_of_studies():
    said = [verdicts.answers(planted(seed, b=0.02), QUESTIONS[:1])[0].verdict for seed in range(300)]
    assert said.count("equal within 0.02") <= 0.05 * 300 + 3 * (300 * 0.05 * 0.95) ** 0.5


def test_a_question_about_an_arm_without_runs_is_left_out_of_the_family():
    found = verdicts.answers(planted(1, b=0.05), QUESTIONS)
    assert [one.question for one in found] == ["first"]
    assert found[0].p == pytest.approx(
        scipy.stats.ttest_rel(*(list(planted(1, b=0.05)[arm].values()) for arm in ("b", "a"))).pvalue
    )


@pytest.mark.long
def test_the_predicted_power_is_the_share_of_simulated_studies_that_decide():
    sd, seeds = 0.06, 60
    random = np.random.default_rng(0)
    equal = np.mean([verdicts.p_of_margin(random.normal(0, sd, seeds)) < 0.05 for _ in range(1000)])
    assert verdicts.power_of_margin(sd, seeds, 0.05) == pytest.approx(equal, abs=0.05)
    effect = verdicts.detectable(sd, seeds, 0.05)
    differs = np.mean([scipy.stats.ttest_1samp(random.normal(effect, sd, seeds), 0).pvalue < 0.05 for _ in range(1000)])
    assert differs == pytest.approx(0.8, abs=0.05)


def test_every_arm_is_tuned_with_the_same_number_of_runs_and_no_seed_serves_two_stages():
    assert {len(study.grid(arm)) for arm in (*study.THRESHOLDS, *study.CAPPED)} == {15}
    stages = [study.PILOT_SEEDS, study.POWER_SEEDS, study.TUNE_SEEDS, study.DECIDE_SEEDS, study.CAP_SEEDS]
    assert len(set().union(*stages)) == sum(map(len, stages))
    assert set(study.FIRST_SEEDS) < set(study.TUNE_SEEDS)
    assert set(study.ANCHOR_SEEDS) < set(study.DECIDE_SEEDS)
    for arm in study.known(study.THRESHOLDS):
        for _, overrides in study.grid(arm):
            trustrl.preset(arm, **overrides)
    for arm in study.CAPPED:
        assert all(trustrl.preset(study.preset_of(arm), **overrides).max_ratio == 2 for _, overrides in study.grid(arm))


def tuned(arm, means):
    """Tuning runs whose areas are the given means by place in the grid, and 0.1 elsewhere."""
    return [
        {
            "preset": study.preset_of(arm),
            "name": arm,
            "lr": rate,
            "overrides": overrides,
            "seed": seed,
            "auc": means.get(at, 0.1),
        }
        for at, (rate, overrides) in enumerate(study.grid(arm))
        for seed in (study.TUNE_SEEDS if at in means else study.FIRST_SEEDS)
    ]


def test_the_choice_is_the_highest_mean_of_the_finalists_and_a_tie_goes_to_the_lower_learning_rate():
    rate, overrides = study.grid("ppo")[7]
    found = study.chosen(tuned("ppo", {2: 0.2, 3: 0.2, 7: 0.4, 9: 0.3}))
    assert (found["ppo"]["lr"], found["ppo"]["overrides"]) == (rate, overrides)
    runs = tuned("ppo", {2: 0.2, 3: 0.2, 7: 0.4, 12: 0.4})
    assert study.chosen(runs)["ppo"]["lr"] == rate
    for missing in (runs[0], runs[-1], next(one for one in runs if one["seed"] == 2015)):
        with pytest.raises(ValueError, match="ppo lacks tuning runs"):
            study.chosen([one for one in runs if one is not missing])


def test_a_late_winner_is_chosen_and_a_setting_that_was_not_a_finalist_is_not():
    runs = tuned("ppo", {2: 0.4, 3: 0.3, 7: 0.3, 12: 0.3})
    for one in runs:
        if one["lr"] == study.grid("ppo")[12][0] and one["overrides"] == study.grid("ppo")[12][1]:
            one["auc"] += 0.2 * (one["seed"] not in study.FIRST_SEEDS)
    rate, overrides = study.grid("ppo")[12]
    assert (study.chosen(runs)["ppo"]["lr"], study.chosen(runs)["ppo"]["overrides"]) == (rate, overrides)
    extra = {**runs[0], "auc": 0.9, "seed": 2010}
    assert study.chosen([*runs, extra])["ppo"]["lr"] == rate


def test_the_second_round_of_tuning_has_the_best_four_of_each_arm_and_starts_after_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "DATA", tmp_path)
    assert len(study.plan("tune", ["ppo"])) == 15 * 4
    first = [one for one in tuned("ppo", {1: 0.4, 3: 0.3, 7: 0.3, 12: 0.3}) if one["seed"] in study.FIRST_SEEDS]
    study.file_of("tune").write_text("".join(json.dumps(one) + "\n" for one in first))
    later = study.plan("tune", ["ppo"])[60:]
    assert {one.seed for one in later} == set(study.TUNE_SEEDS) - set(study.FIRST_SEEDS)
    assert [(one.lr, one.overrides) for one in later[:4]] == [study.grid("ppo")[at] for at in (1, 3, 7, 12)]
    assert len(later) == 4 * 12


def test_the_deciding_stage_has_60_seeds_of_each_tuned_arm_and_raises_without_tuning(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "DATA", tmp_path)
    with pytest.raises(ValueError, match="No tuning runs of dppo-binary-tv, dppo-topk-tv, ipo"):
        study.plan("decide")
    arms = [arm for arm in study.THRESHOLDS if arm != study.OPTIONAL]
    made = [one for arm in arms for one in tuned(arm, {1: 0.2, 3: 0.2, 7: 0.4, 12: 0.3})]
    study.file_of("tune").write_text("".join(json.dumps(one) + "\n" for one in made))
    runs = study.plan("decide")
    assert len(runs) == 60 * 5
    assert {(one.lr, str(one.overrides)) for one in runs if one.preset == "ppo"} == {
        (study.grid("ppo")[7][0], str(study.grid("ppo")[7][1]))
    }
    variants = study.plan("anchors")
    assert len(variants) == 40 * 5
    named = {one.as_dict()["name"] for one in runs + variants}
    assert named >= {name for q in study.ANCHOR_QUESTIONS for name in q[1:]}
    for one in variants[:5]:
        one.region()
    with pytest.raises(ValueError, match="Tuning is not complete"):
        study.plan("updates")
    tried = study.plan("updates-tune")
    assert len(tried) == 4 * 8 * 6
    best = [{**one.as_dict(), "auc": 0.3 + (one.lr == 5.6e-3) * one.updates} for one in tried]
    study.file_of("updates-tune").write_text("".join(json.dumps(one) + "\n" for one in best))
    later = study.plan("updates")
    assert {(one.updates, one.lr) for one in later} == {(1, 5.6e-3), (4, 5.6e-3)}
    assert len(later) == 20 * 8
    with pytest.raises(ValueError, match="No tuning runs of cispo, dppo-binary-tv-capped, dppo-topk-tv-capped"):
        study.plan("cap")
    assert len(study.plan("cap-tune")) == 3 * 15 * 4
    made = [one for arm in study.CAPPED for one in tuned(arm, {1: 0.2, 3: 0.2, 7: 0.4, 12: 0.3})]
    study.file_of("cap-tune").write_text("".join(json.dumps(one) + "\n" for one in made))
    assert len(study.plan("cap-tune")) == 3 * 108
    follow_up = study.plan("cap")
    assert len(follow_up) == 40 * 7
    assert {one.name for one in follow_up} == {arm for q in study.CAP_QUESTIONS for arm in q[1:]}
    assert {one.preset for one in follow_up} == {"cispo", *study.CAP_OTHERS}
    sizes = study.plan("cap-size")
    assert len(sizes) == 20 * 6
    assert {(one.name, one.region().max_ratio) for one in sizes} == {
        *(("dppo-binary-tv" + f"@{cap}", cap) for cap in (2.0, 3.0, 5.0)),
        *(("dppo-binary-tv-capped" + f"@{cap or 'none'}", cap) for cap in (3.0, 5.0, None)),
    }


def test_a_stage_resumes_without_the_finished_runs_and_drops_a_line_that_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "DATA", tmp_path)
    planned = study.plan("pilot", ["pg-is"])
    done = [json.dumps({**one.as_dict(), "auc": 0.2}) + "\n" for one in planned[:2]]
    study.file_of("pilot").write_text("".join(done) + '{"preset": "pg-')
    assert run.remaining("pilot", ["pg-is"]) == planned[2:]
    assert study.file_of("pilot").read_text() == "".join(done)


def exact_accuracy(policy):
    """Accuracy on held-out prompts by dynamic programming over all admitted tokens."""
    w, rules = synonym_world, synonym_world.grammar()
    total = 0.0
    for prompt in rules.held_out[:3]:
        value = rules.attribute(prompt.unsqueeze(0))[0]
        states = {w.VOCABULARY: 1.0}
        for place in range(w.PLACES):
            previous = torch.tensor(list(states))
            mass = torch.tensor(list(states.values()), dtype=torch.float64)
            kind = torch.where(previous == w.VOCABULARY, 0, previous // w.SYNONYMS % 2)
            at = torch.full_like(previous, place)
            hidden = policy.hidden(at, value[place].expand_as(previous), previous)
            probability = torch.softmax((hidden @ policy.head.T + policy.bias).double(), dim=1)
            pair = rules.admitted(place, value[place].expand_as(previous), kind)
            following: dict[int, float] = {}
            for row, two in enumerate(pair.tolist()):
                for concept in two:
                    ids = slice(concept * w.SYNONYMS, (concept + 1) * w.SYNONYMS)
                    for token, p in enumerate(probability[row, ids].tolist(), ids.start):
                        following[token] = following.get(token, 0.0) + mass[row].item() * p
            states = following
        total += sum(states.values())
    return total / 3


@pytest.fixture(scope="module")
def competent():
    """A policy that was trained for a short time."""
    return synonym_world.pretrain((300, 1), progress=False)


@pytest.mark.long
@torch.no_grad()
def test_the_evaluation_agrees_with_dynamic_programming(monkeypatch, competent):
    policy, rules = competent, synonym_world.grammar()
    some = type(rules)(rules.candidates, rules.error, rules.synonym, rules.train, rules.held_out[:3])
    monkeypatch.setattr(synonym_world, "grammar", lambda: some)
    estimate, error = synonym_world.evaluate(policy, answers=64)
    exact = exact_accuracy(policy)
    assert exact > 0.001
    assert abs(estimate - exact) < 4 * error
    assert error < 0.1 * exact


def test_log_probs_have_the_gradient_of_log_softmax_also_where_a_column_is_asked_for_twice():
    torch.manual_seed(0)
    made = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (6, 4), (6,))]
    hidden, head, bias = made
    ids, slopes = torch.tensor([[0, 1], [5, 5], [2, 4]]), (torch.randn(3, 2).double(), torch.randn(3).double())
    logits = hidden @ head.T + bias
    plain = torch.log_softmax(logits, dim=1).gather(1, ids), torch.logsumexp(logits, dim=1)
    ours = synonym_world.LogProbs.apply(*made, ids)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, made, slopes), torch.autograd.grad(plain, made, slopes))


def test_answers_of_a_corpus_without_errors_are_right_and_one_other_concept_makes_them_wrong():
    rules = synonym_world.grammar()
    clean = type(rules)(rules.candidates, torch.zeros_like(rules.error), rules.synonym, rules.train, rules.held_out)
    tokens = clean.corpus(rules.train, torch.Generator().manual_seed(0))
    assert rules.right(rules.train, tokens).all()
    last = tokens.clone()
    pairs = rules.candidates[-1, rules.attribute(rules.train)[:, -1]].view(-1, 2, 2)
    kind = tokens[:, -2] // synonym_world.SYNONYMS % 2
    last[:, -1] = pairs[torch.arange(len(pairs)), 1 - kind, 0] * synonym_world.SYNONYMS
    assert not rules.right(rules.train, last).all(1).any()


@pytest.mark.long
@pytest.mark.parametrize("requested", [0.0, 0.04])
def test_the_mismatch_is_the_requested_one_and_0_is_none(monkeypatch, requested, competent):
    monkeypatch.setattr(synonym_world, "start", lambda: copy.deepcopy(competent))
    settings = synonym_training.Run("ppo", 0, 1e-5, updates=1, rollouts=4, mismatch=requested)
    measured = synonym_training.train(settings)["mismatch_measured"]
    assert measured == pytest.approx(requested, abs=0.01 if requested else 1e-5)


def test_the_noise_of_the_sampler_follows_the_measured_mismatch(competent):
    sampler = synonym_training.Sampler(synonym_training.Run("ppo", 0, 1e-3, mismatch=0.04), competent)
    before = sampler.scale
    sampler.follow(0.05)
    assert sampler.scale == pytest.approx(0.8 * before)
    sampler.follow(1.0)  # at most by half in one rollout
    assert sampler.scale == pytest.approx(0.4 * before)


def test_two_arms_of_one_seed_have_the_same_first_rollout(monkeypatch, competent):
    monkeypatch.setattr(synonym_world, "start", lambda: copy.deepcopy(competent))
    results = [
        synonym_training.train(synonym_training.Run(arm, 3, 1e-3, updates=1, rollouts=1)) for arm in ("pg-is", "troll")
    ]
    assert results[0]["reward"] == results[1]["reward"]
    assert results[0]["accuracy"][0] == results[1]["accuracy"][0]


def test_the_page_of_the_world_is_what_its_command_writes(tmp_path, monkeypatch):
    import world_table

    page = tmp_path / "world-2.md"
    page.write_text(world_table.PAGE.read_text())
    monkeypatch.setattr(world_table, "PAGE", page)
    world_table.page()
    assert page.read_text() == (ROOT / "docs/results/world-2.md").read_text()


def test_the_pages_of_the_study_are_what_their_command_writes(tmp_path, monkeypatch):
    import second_study

    names = ("PAGE", "TABLES", "README")
    originals = {name: getattr(second_study, name) for name in names}
    for name, page in originals.items():
        copied = tmp_path / page.name
        copied.write_text(page.read_text())
        monkeypatch.setattr(second_study, name, copied)
    second_study.page()
    for name, page in originals.items():
        assert getattr(second_study, name).read_text() == page.read_text(), page.name


@pytest.mark.parametrize(("block", "function"), [("presets", "presets"), ("answers", "gains"), ("claims", "table")])
def test_the_tables_of_the_answer_page_are_what_their_command_writes(block, function):
    import claims

    text = claims.GUIDE.read_text()
    shown = text.partition(f"<!-- begin {block} -->\n")[2].partition(f"\n<!-- end {block} -->")[0]
    assert shown == getattr(claims, function)()


def test_failed_runs_and_the_published_clip_follow_from_the_raw_files():
    data, page = ROOT / "docs/results/data", (ROOT / "docs/results/second-study-tables.md").read_text()
    runs = {stage: [json.loads(line) for line in (data / f"evidence2-{stage}.jsonl").open()] for stage in study.STAGES}
    every = [run["accuracy"][-1] < run["accuracy"][0] for stage in runs.values() for run in stage]
    assert f"In all stages {sum(every)} of {len(every):,} registered runs" in page
    binary = [run for run in runs["tune"] if run["name"] == "dppo-binary-tv" and run["lr"] == 0.01]
    failed = sum(run["accuracy"][-1] < run["accuracy"][0] for run in binary)
    assert f"| `dppo-binary-tv` | {failed} of {len(binary)} |" in page
    clip = [run for run in runs["tune"] if run["overrides"].get("ratio") == {"max_decrease": 0.2, "max_increase": 0.28}]
    best = {run["seed"]: run["auc"] for run in clip if run["lr"] == 0.0056}
    wide = [run for run in runs["tune"] if run["overrides"].get("ratio") == {"max_decrease": 0.8, "max_increase": 1.12}]
    gaps = [run["auc"] - best[run["seed"]] for run in wide if run["lr"] == 0.0032 and run["seed"] in best]
    assert f"| `ppo` 0.8/1.12 | {len(gaps)} | {np.mean(gaps):+.3f} [" in page


@pytest.mark.parametrize(
    "stage", ["tune", "decide", "anchors", "updates-tune", "updates", "cap-tune", "cap", "cap-size"]
)
def test_every_registered_run_was_made_and_no_other(stage):
    planned = [run.key(one.as_dict()) for one in study.plan(stage)]
    made = [run.key(one) for one in study.read(stage)]
    assert sorted(made) == sorted(planned)


def test_a_stage_that_is_not_complete_has_no_verdicts(tmp_path, monkeypatch):
    import second_study

    monkeypatch.setattr(study, "DATA", tmp_path)
    assert second_study.missing("decide") == "The stage `decide` has not started."
    made = [one for arm in study.known(study.THRESHOLDS) for one in tuned(arm, {1: 0.2, 3: 0.2, 7: 0.4, 12: 0.3})]
    study.file_of("tune").write_text("".join(json.dumps(one) + "\n" for one in made))
    first = [{**one.as_dict(), "auc": 0.1 * at} for at, one in enumerate(study.plan("decide")[:-1])]
    study.file_of("decide").write_text("".join(json.dumps(one) + "\n" for one in first))
    assert second_study.missing("decide") == "The stage `decide` is not complete: 359 of 360 runs."
