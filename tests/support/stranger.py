"""A stranger's data: a JSONL file, a reward function of ten lines, and a recipe that names both."""

import json
from importlib.util import module_from_spec, spec_from_file_location

from trustrl.recording.record_files import SEQUENCES, TEXTS

REWARDS = '''
def score(completion, answer, bonus):
    """Share of the answer's letters that the completion contains, and a bonus for a short one."""
    print("not part of the answer")
    letters = set(answer)
    share = len(letters & set(completion)) / len(letters)
    if len(completion) < 6:
        share += bonus
    return share
'''
RECIPE = """
name = "mine"
[model]
name = "{model}"
[data]
files = "mine.jsonl"
held_out_files = "test.jsonl"
prompt = "question"
answer = "solution.text"
columns = ["bonus"]
[reward]
function = "rewards.py:score"
[engine]
name = "{engine}"
[region]
preset = "dppo-binary-tv"
[optimiser]
learning_rate = 3e-3
[schedule]
steps = 2
prompts_per_step = 4
completions_per_prompt = 4
max_prompt_tokens = 16
max_completion_tokens = 8
[evaluation]
count = 6
[records]
sample = 1.0
"""


def write(folder, *, model, engine):
    """Writes the stranger's three files."""
    rows = [
        {"question": f"{a}+{b}=", "solution": {"text": f"{a + b}"}, "bonus": a / 10} for a in range(8) for b in range(8)
    ]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[6:]))
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "mine.toml").write_text(RECIPE.format(model=model, engine=engine))
    return rows


def check_run(run, folder, rows):
    """Compares prompts and rewards of every recorded completion with the files."""
    import pyarrow.parquet as pq

    spec = spec_from_file_location("stranger_rewards", folder / "rewards.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    problems = {row["question"]: row for row in rows[6:]}
    tables = {
        name: [
            row
            for file in sorted((run / "records" / name).glob("*.parquet"))
            for row in pq.read_table(file).to_pylist()
        ]
        for name in (SEQUENCES, TEXTS)
    }
    texts = {row["sequence"]: row for row in tables[TEXTS]}
    assert len(tables[SEQUENCES]) == 2 * 4 * 4
    scores = []
    for row in tables[SEQUENCES]:
        text = texts[row["sequence"]]
        problem = problems[text["prompt"]]
        scores.append(module.score(text["completion"], problem["solution"]["text"], problem["bonus"]))
        assert abs(row["reward"] - scores[-1]) < 1e-6, (text, row["reward"], scores[-1])
    assert len(set(scores)) > 3  # otherwise one number would do for all
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 2]
    assert all(row["count"] == 6 for row in evaluations)
