"""Trackers of recipes: settings and variables of each engine, and what is refused. Real runs are with the engines."""

import pytest

from trustrl.errors import ConfigError, MissingPackageError
from trustrl.runner import trackers
from trustrl.runner.plan import plan
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.recipe_tables import TRACKERS
from trustrl.runner.trl_arguments import grpo_fields, trainer_arguments
from trustrl.runner.verl_command import command


def recipe(*settings, name="tour"):
    return load(name, settings)


def test_a_recipe_without_a_tracker_reports_to_none_and_sets_nothing(tmp_path):
    assert grpo_fields(recipe(), "")["report_to"] == []
    assert "trainer.logger=[console,file]" in command(recipe(name="verl-tour"), tmp_path, "model")
    assert trackers.environment(recipe(), tmp_path) == {}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_both_engines_get_the_tracker_and_keep_its_files_in_the_run_directory(tracker, tmp_path):
    chosen = recipe(f"logging.tracker={tracker}")
    assert grpo_fields(chosen, "")["report_to"] == [tracker]
    on_verl = recipe(f"logging.tracker={tracker}", name="verl-tour")
    assert f"trainer.logger=[console,file,{tracker}]" in command(on_verl, tmp_path, "model")
    variables = trackers.environment(chosen, tmp_path)
    assert any(str(tmp_path) in value for value in variables.values())
    assert all(name.startswith(f"{tracker.upper()}_") for name in variables)
    assert Recipe.from_dict(chosen.to_dict()) == chosen


def test_trackio_stays_on_this_machine():
    assert grpo_fields(recipe("logging.tracker=trackio"), "")["trackio_space_id"] is None


def test_a_recipe_logs_all_metrics_unless_it_says_otherwise(tmp_path):
    key = "+actor_rollout_ref.actor.policy_loss.metrics=all"
    assert trainer_arguments(recipe())["metrics"] == "all"
    assert key in command(recipe(name="verl-tour"), tmp_path, "model")
    few = "logging.metrics=core"
    assert trainer_arguments(recipe(few))["metrics"] == "core"
    assert key not in command(recipe(few, name="verl-tour"), tmp_path, "model")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("logging.tracker=comet", "logging.tracker must be one of 'tensorboard', 'wandb', 'trackio', 'mlflow', got"),
        ("logging.metrics=few", "logging.metrics must be one of 'core', 'all', got 'few'"),
        ("logging.project=mine", r"\[logging\] has no 'project'"),
    ],
)
def test_what_a_recipe_cannot_log_is_refused(setting, says):
    with pytest.raises(ConfigError, match=says):
        recipe(setting)


@pytest.mark.parametrize(
    ("name", "own"),
    [("tour", 'engine.settings.report_to="wandb"'), ("verl-tour", 'engine.settings.trainer.logger=["console"]')],
)
def test_two_places_for_a_tracker_are_refused(name, own, tmp_path):
    plan(recipe(own, name=name), tmp_path)
    with pytest.raises(ConfigError, match=r"engine.settings must leave out \S+ if logging.tracker is 'mlflow', got"):
        plan(recipe(own, "logging.tracker=mlflow", name=name), tmp_path)


def test_a_missing_tracker_is_named_before_training(monkeypatch):
    monkeypatch.setattr("trustrl.optional_imports.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"wandb is not installed.*pip install wandb"):
        trackers.require_package(recipe("logging.tracker=wandb"))
    trackers.require_package(recipe())


def test_mlflow_without_its_database_is_named_too(monkeypatch):
    """mlflow-skinny has no SQLAlchemy, and a server needs none here."""
    monkeypatch.setattr("trustrl.optional_imports.find_spec", lambda name: None if name == "sqlalchemy" else name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(MissingPackageError, match=r"sqlalchemy is not installed.*pip install mlflow"):
        trackers.require_package(recipe("logging.tracker=mlflow"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    trackers.require_package(recipe("logging.tracker=mlflow"))
