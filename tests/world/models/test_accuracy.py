"""Evaluations: the number of answers that are sampled at once."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from trustrl.world.models import accuracy, tiny


class Silent(torch.nn.Module):
    """A model that answers nothing, and counts the prompts of each call."""

    device = "cpu"

    def __init__(self):
        super().__init__()
        self.shapes = []

    def generate(self, input_ids, attention_mask, generation_config):
        self.shapes.append(tuple(input_ids.shape))
        return input_ids


@pytest.mark.parametrize(
    ("problems", "prompt", "answer", "calls"),
    [
        pytest.param(300, 4, 8, [256, 44], id="short ones"),
        pytest.param(20, 2048, 2048, [8, 8, 4], id="long ones"),
        pytest.param(2, 40_000, 8, [1, 1], id="one that is longer than all tokens together"),
    ],
)
def test_long_problems_are_answered_in_smaller_batches(problems, prompt, answer, calls):
    model = Silent()
    rows = [{"prompt": "1" * prompt} for _ in range(problems)]
    texts = accuracy.sampled_answers(model, tiny.tokenizer(), rows, accuracy.Decoding(0, answer, 0.0))
    assert texts == [""] * problems
    assert [count for count, _ in model.shapes] == calls
    assert {length for _, length in model.shapes} == {prompt}
