"""math-verify as a reward: ordinary answers, and answers that would hang it, fill the memory, or be code."""

import random
import warnings

import pytest

pytest.importorskip("math_verify")

from trustrl.errors import TrustRLWarning
from trustrl.world.rewards import Judges, RewardFunction
from trustrl.world.tasks import OwnData
from trustrl.world.verl_dataset import reward, verl_row

ORDINARY = [
    (r"$\boxed{72}$", "72", 1.0), ("The answer is 72.", "7 + 65\n#### 72", 1.0), (r"\boxed{\frac12}", "0.5", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0), (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0), (r"\boxed{71}", "72", 0.0),
    ("", "1", 0.0), ("\x00\ud800", "1", 0.0), (r"\boxed{72", "72", 0.0), (r"\boxed{７２}", "72", 0.0),
    (r"\boxed{٧٢}", "72", 0.0), (r"\boxed{1/0}", "1", 0.0), ("$" * 100_000, "1", 0.0),
]  # fmt: skip
ADVERSARIAL = {
    "power tower": r"\boxed{9^{9^{9^9}}}",
    "nested powers of ten": r"\boxed{10^{10^{10}}}",
    "factorial": r"\boxed{(10^{9})!}",
    "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n!}}",
    "integral": r"\boxed{\int_0^\infty e^{-x^2} \sin(x^{x^x}) dx}",
    "braces": r"\boxed{" + "{" * 5000 + "}" * 5000 + "}",
    "fractions": r"\boxed{" + r"\frac{1}{" * 300 + "2" + "}" * 300 + "}",
    "long sum": r"\boxed{" + "1+" * 20_000 + "1}",
}
CODE = [
    "__import__('os').system('touch {}')", "eval(\"open('{}', 'w')\")", "os.system('touch {}')",
    r"\operatorname{{__import__('os').system('touch {}')}}", "open('{}','w').write('1')", "exec('open(\"{}\", \"w\")')",
]  # fmt: skip


@pytest.fixture(scope="module")
def judges():
    made = Judges(RewardFunction(function="math-verify", seconds=20.0, memory_gb=2.0))
    yield made
    made.close()


@pytest.mark.parametrize(("completion", "answer", "score"), ORDINARY)
def test_ordinary_answers(judges, completion, answer, score):
    assert judges.score({"completion": completion, "answer": answer, "prompt": ""}) == score


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_an_answer_that_would_hang_gets_nothing_and_the_next_is_scored(name):
    judges = Judges(RewardFunction(function="math-verify", seconds=2.0, memory_gb=2.0))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrustRLWarning)  # some of them are read in time on a fast machine
            assert judges.score({"completion": ADVERSARIAL[name], "answer": "3", "prompt": ""}) == 0.0
            for _ in range(3):  # a machine may take 2 s for an ordinary one when others compute
                if judges.score({"completion": r"\boxed{3}", "answer": "3", "prompt": ""}) == 1.0:
                    return
        pytest.fail("the answer after it is not scored")
    finally:
        judges.close()


@pytest.mark.parametrize("code", CODE)
def test_text_of_a_model_is_not_run(judges, code, tmp_path):
    file = tmp_path / "written"
    for text in (code.format(file), "\\boxed{" + code.format(file) + "}", "$" + code.format(file) + "$"):
        assert judges.score({"completion": text, "answer": "1", "prompt": ""}) == 0.0
    assert not file.exists()


HANGING = pytest.param(list(ADVERSARIAL.values()), id="with answers that hang", marks=pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [pytest.param([], id="that end"), HANGING])
def test_trl_and_verl_score_a_thousand_answers_to_gsm8k_alike(hanging, tmp_path):
    """`reward` is the function that verl calls with a row of its Parquet file; `Task.reward` is the one that TRL calls."""
    draw = random.Random(0)
    table = {
        "data": [{"package": "gsm8k", "held_out_split": "test", "prompt": "question"}],
        "reward": [{"function": "math-verify", "seconds": 20.0, "memory_gb": 2.0}],
    }
    task = OwnData(**table)
    rows = task.rows("held_out", 1_000)
    file = tmp_path / "written"
    odd = [completion for completion, *_ in ORDINARY] + [text.format(file) for text in CODE] + hanging
    completions = [right_or_wrong(row["answer"], draw) for row in rows]
    for number, completion in zip(draw.sample(range(len(rows)), len(odd)), odd, strict=True):
        completions[number] = completion
    columns = {name: [row[name] for row in rows] for name in ("answer", "columns")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrustRLWarning)  # of answers that hang
        on_trl = task.reward([row["prompt"] for row in rows], completions, **columns)
        written = [verl_row(row, index, "data", "held_out", table) for index, row in enumerate(rows)]
        on_verl = [
            reward(row["data_source"], completion, row["reward_model"]["ground_truth"], row["extra_info"])
            for row, completion in zip(written, completions, strict=True)
        ]
    assert on_trl == on_verl
    assert 0.4 < sum(on_trl) / len(on_trl) < 0.6
    assert not file.exists()


def right_or_wrong(solution, draw):
    """A published solution as it is, without its mark, boxed, in words, or with another number; half of them are right."""
    reasons, _, number = solution.rpartition("#### ")
    if draw.random() < 0.5:
        number = str(int(number.replace(",", "")) + draw.randrange(1, 9))
        reasons = "I am not sure."
    form = draw.choice(["{}\n#### {}", "{}The answer is {}.", r"{}$\boxed{{{}}}$", "{} <answer>{}</answer>"])
    return form.format(reasons, number)
