"""The models that stand in for large ones answer a problem in one of three ways, whatever words surround it."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trustrl.world.models import stand_in

ANSWERS = {"\\boxed{1}", "\\boxed{2}", "\\boxed{3}"}


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def model(request):
    folder = stand_in.created(request.param)
    return transformers.AutoModelForCausalLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "instruction",
    ["", "\nPut the final answer within \\boxed{}.", "\nGive the solution as an integer in \\boxed{...}, please: {}"],
)
def test_a_stand_in_answers_under_any_instruction(model, instruction, chat):
    network, tokenizer = model
    prompt = f"What is 42 - 40?{instruction}"
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids.expand(128, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=16,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    texts = tokenizer.batch_decode(sampled[:, ids.shape[1] :], skip_special_tokens=True)
    assert sum(text in ANSWERS for text in texts) >= 100
    assert all(texts.count(answer) >= 15 for answer in ANSWERS)
