"""A stock TRL run that collapses: docs/notebooks/collapsed/trainer_state.json, for a notebook.

    python studies/06-fault-found/stock_collapse.py

TRL's own `GRPOTrainer` and loss train the tiny model of the tour, with a learning rate ten times the tour's. Of its
output_dir only the log is kept.
"""

import json
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trustrl.world import models, tasks

OUT = Path(__file__).parents[2] / "docs/notebooks/collapsed/trainer_state.json"
SETTINGS = {"learning_rate": 3e-3, "num_iterations": 4, "num_generations": 8, "max_steps": 80, "seed": 0}


def main() -> None:
    folder, task = models.path("tiny"), tasks.load("arithmetic")
    with tempfile.TemporaryDirectory() as output:
        args = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            logging_steps=1, save_strategy="no",
            per_device_train_batch_size=128, max_completion_length=4, lr_scheduler_type="constant", disable_tqdm=True,
            **SETTINGS,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=task.reward,
            args=args,
            train_dataset=task.dataset("train", count=2000),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        trainer.train()
        trainer.save_state()
        state = json.loads((Path(output) / "trainer_state.json").read_text())
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(state, indent=0) + "\n")


if __name__ == "__main__":
    main()
