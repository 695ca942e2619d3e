"""A task's files as verl's own dataset reads them, and its scores as verl's own loader finds them."""

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.dataset.rl_dataset import RLHFDataset

from support.tiny_models import character_tokenizer
from trustrl.errors import ConfigError, MissingDataError
from trustrl.world import tasks
from trustrl.world.verl_dataset import PLAIN_CHAT, REWARD, main, reward, write_parquet


def read(path):
    config = OmegaConf.create({"prompt_key": "prompt", "max_prompt_length": 64, "filter_overlong_prompts": False})
    dataset = RLHFDataset([str(path)], character_tokenizer(), config)
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize("chat", [False, True])
def test_verl_reads_the_prompts_and_scores_them_as_the_task_does(tmp_path, chat):
    path = write_parquet(tmp_path / "new" / "train.parquet", "arithmetic", "train", count=20, chat=chat, digits=3)
    rows = read(path)
    task = tasks.load("arithmetic", digits=3)
    expected = task.rows("train", 20, chat=chat)
    assert len(rows) == 20
    call = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": REWARD}}))
    for row, problem in zip(rows, expected, strict=True):
        said = row["raw_prompt"][-1]["content"]
        assert said == (problem["prompt"][-1]["content"] if chat else problem["prompt"])
        truth = row["reward_model"]["ground_truth"]
        assert truth == problem["answer"]
        answers = {truth: 1.0, str(int(truth) + 1): 0.0, f"It is {truth}.": 1.0 if chat else 0.0}
        for text, score in answers.items():
            given = {"solution_str": text, "ground_truth": truth, "extra_info": dict(row["extra_info"], num_turns=2)}
            assert call(data_source=row["data_source"], **given) == score == task.score(text, problem)


def test_splits_do_not_overlap_and_the_seed_orders_them(tmp_path):
    prompts = {
        name: [row["raw_prompt"][0]["content"] for row in read(write_parquet(tmp_path / f"{name}.parquet", **call))]
        for name, call in {
            "train": {"task": "arithmetic", "split": "train", "count": 300},
            "other order": {"task": "arithmetic", "split": "train", "count": 300, "seed": 1},
            "held out": {"task": "arithmetic", "split": "held_out", "count": 300},
        }.items()
    }
    assert not set(prompts["train"]) & set(prompts["held out"])
    assert prompts["train"] != prompts["other order"]


def test_the_plain_template_is_the_text_itself():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = PLAIN_CHAT
    messages = [{"role": "user", "content": "12+34="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert ids["input_ids"] == tokenizer("12+34=")["input_ids"]


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(MissingDataError, match="extra_info must have the key 'trustrl', got index"):
        reward("gsm8k", "42", "42", {"index": 0})
    with pytest.raises(MissingDataError, match="got nothing"):
        reward("gsm8k", "42", "42")
    with pytest.raises(ConfigError, match="split must be"):
        write_parquet(tmp_path / "x.parquet", "arithmetic", "test")


def test_the_command_line_writes_the_same_file(tmp_path, capsys):
    main(["arithmetic", str(tmp_path / "a.parquet"), "--split", "held_out", "--count", "5", "--seed", "3"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.parquet")
    same = write_parquet(tmp_path / "b.parquet", "arithmetic", "held_out", count=5, seed=3)
    prompts = [[row["raw_prompt"] for row in read(path)] for path in (tmp_path / "a.parquet", same)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 5
