"""A small recipe, and the recipes that the package ships."""

from pathlib import Path

from trustrl.runner import recipe_files
from trustrl.runner.recipe import Recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.toml"))
TRIGGERS = 'records.triggers=[{kind="entropy-slope", max_fall=0.05}, {kind="non-finite", at_most_every=7}]'
SMALL = {
    "name": "small",
    "model": {"name": "tiny"},
    "task": {"name": "arithmetic"},
    "engine": {"name": "trl"},
    "region": {"preset": "dppo-binary-tv"},
    "optimiser": {"learning_rate": 1e-4},
    "schedule": {
        "steps": 8, "prompts_per_step": 4, "completions_per_prompt": 4, "max_prompt_tokens": 8,
        "max_completion_tokens": 4, "updates_per_batch": 2,
    },
}  # fmt: skip


def small(*overrides):
    return Recipe.from_dict(recipe_files.override(SMALL, overrides))
