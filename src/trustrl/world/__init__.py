"""Small models and tasks to train on: `trustrl.world.models` and `trustrl.world.tasks`."""
