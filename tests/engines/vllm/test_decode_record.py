"""Arrays recorded while vLLM decodes, compared with vLLM's own lists: equal, bit for bit."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import numpy as np
from trl.generation.vllm_generation import extract_logprobs
from vllm import LLM, SamplingParams

from support.tiny_models import LONGEST, VOCABULARY, save_model, some_sequences
from trustrl.engines.common.kept_columns import check_limit
from trustrl.engines.vllm import cpu_options, decode_record, kept_in_engine
from trustrl.engines.vllm.decode_record import REQUEST, DecodedLogprobs, RecordedLogprob, install, recording
from trustrl.errors import EngineError

ROOT = Path(__file__).parents[3]
PROMPTS = [{"prompt_token_ids": ids} for ids in some_sequences(3, 9, 20, 4, 4, 7)]

pytestmark = pytest.mark.xdist_group("decode record")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, tied=False)
    install()
    started = LLM(
        str(path), max_model_len=LONGEST, max_logprobs=-1, logprobs_mode="processed_logprobs", seed=0,
        **cpu_options(kv_cache_memory_bytes=1 << 26),
    )  # fmt: skip
    install()  # again, for the engine in this process
    return started


def sample(llm, parameters):
    return llm.generate(PROMPTS, sampling_params=parameters, use_tqdm=False)


def parameters(k, *, arrays, **settings):
    marked = {"extra_args": {REQUEST: True}} if arrays else {"flat_logprobs": True}
    more = {"max_tokens": 40, "ignore_eos": True, "detokenize": False, "seed": 3, **settings}
    return SamplingParams(logprobs=k, **marked, **more)


def assert_equal_to_flat(arrays, flat):
    """`flat` holds one number per position and column, in vLLM's order."""
    ids, logp = arrays.logprobs.table()
    assert list(arrays.token_ids) == list(flat.token_ids) == ids[:, 0].tolist()
    assert flat.logprobs.token_ids == ids.ravel().tolist()
    np.testing.assert_array_equal(np.array(flat.logprobs.logprobs, np.float32), logp.ravel())
    assert arrays.cumulative_logprob == pytest.approx(flat.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("k", "settings"),
    [
        *(pytest.param(k, {}, id=f"plain, K = {k}") for k in (0, 1, 20, 64, 256)),
        pytest.param(20, {"temperature": 0.7}, id="temperature"),
        pytest.param(20, {"top_p": 0.9}, id="top-p"),
        pytest.param(64, {"top_k": 8}, id="top-k"),
        pytest.param(256, {"min_p": 0.1}, id="min-p"),
        pytest.param(1, {"temperature": 0.0}, id="greedy"),
    ],
)
def test_arrays_equal_vllms_own_lists(llm, k, settings):
    recorded, flat = (sample(llm, parameters(k, arrays=arrays, **settings)) for arrays in (True, False))
    for ours, theirs in zip(recorded, flat, strict=True):
        assert isinstance(ours.outputs[0].logprobs, DecodedLogprobs)
        assert ours.outputs[0].logprobs.table()[0].shape == (40, 1 + k)
        assert_equal_to_flat(ours.outputs[0], theirs.outputs[0])


def test_several_completions_of_one_prompt_have_tables_of_their_own(llm):
    recorded, flat = (sample(llm, parameters(4, arrays=arrays, n=3)) for arrays in (True, False))
    for ours, theirs in zip(recorded, flat, strict=True):
        assert len(ours.outputs) == 3
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert_equal_to_flat(one, other)


def test_requests_of_one_batch_may_ask_for_different_widths(llm):
    widths = (0, 3, 40, 5, 256, 1)
    recorded, flat = (
        sample(llm, [parameters(k, arrays=arrays) for k in widths]) for arrays in (True, False)
    )  # one list of parameters for each prompt
    for k, ours, theirs in zip(widths, recorded, flat, strict=True):
        assert ours.outputs[0].logprobs.table()[1].shape == (40, 1 + k)
        assert_equal_to_flat(ours.outputs[0], theirs.outputs[0])


TRUNCATED = [
    pytest.param({"top_p": 0.9}, id="top-p"),
    pytest.param({"top_k": 8}, id="top-k"),
    pytest.param({"min_p": 0.1}, id="min-p"),
    pytest.param({"top_p": 0.8, "top_k": 30, "min_p": 0.01, "temperature": 0.7}, id="all"),
]


@pytest.mark.parametrize("settings", TRUNCATED)
def test_kept_ids_are_those_that_vllm_gave_mass_to(llm, settings):
    asked = recording(5, max_kept=VOCABULARY - 1)
    more = {"max_tokens": 40, "ignore_eos": True, "detokenize": False, "seed": 3, **settings}
    recorded = sample(llm, SamplingParams(**asked, **more))
    flat = sample(llm, parameters(VOCABULARY, arrays=False, **settings))
    for ours, theirs in zip(recorded, flat, strict=True):
        ids = np.array(theirs.outputs[0].logprobs.token_ids).reshape(40, 1 + VOCABULARY)[:, 1:]
        logp = np.array(theirs.outputs[0].logprobs.logprobs).reshape(ids.shape[0], -1)[:, 1:]
        kept = ours.outputs[0].logprobs.kept().rows()
        assert len(kept) == 40
        for t, row in enumerate(kept):
            assert set(row) == set(ids[t][np.isfinite(logp[t])])
            assert ours.outputs[0].token_ids[t] in row
        table_ids, table_logp = ours.outputs[0].logprobs.table()
        np.testing.assert_array_equal(table_logp[:, 1:], logp[:, :5].astype(np.float32))
        finite = np.isfinite(table_logp[:, 1:])  # all removed ids have the same log-prob, so any may follow
        np.testing.assert_array_equal(table_ids[:, 1:][finite], ids[:, :5][finite])
        later = ours.outputs[0].logprobs[7:11].kept().rows()
        assert [list(row) for row in later] == [list(row) for row in kept[7:11]]


@pytest.mark.parametrize("settings", TRUNCATED)
def test_the_sampler_sends_kept_ids_alone_and_they_are_those_of_the_columns(llm, settings, monkeypatch):
    """Without `kept_in_engine`, as on a GPU, the columns show which ids were kept."""
    more = {"max_tokens": 40, "ignore_eos": True, "detokenize": False, "seed": 3, **settings}
    widths = []
    monkeypatch.setattr(DecodedLogprobs, "add", noting(DecodedLogprobs.add, widths))
    asked = SamplingParams(**recording(5, max_kept=VOCABULARY - 1), **more)
    compact = [output.outputs[0].logprobs for output in sample(llm, asked)]
    assert {columns for _, columns in widths} == {6}
    kept = np.concatenate([record.kept().counts for record in compact])
    assert sorted(ids - 6 for ids, _ in widths) == sorted(kept)
    widths.clear()
    monkeypatch.setattr(kept_in_engine, "plan_of", lambda *_: None)
    columns = [output.outputs[0].logprobs for output in sample(llm, asked)]
    assert set(widths) == {(VOCABULARY + 1, VOCABULARY + 1)}
    for ours, theirs in zip(compact, columns, strict=True):
        assert [set(row) for row in ours.kept().rows()] == [set(row) for row in theirs.kept().rows()]
        np.testing.assert_array_equal(ours.table()[1], theirs.table()[1])
        finite = np.isfinite(ours.table()[1])
        np.testing.assert_array_equal(ours.table()[0][finite], theirs.table()[0][finite])


def noting(add, widths):
    def noted(self, ids, logp, ranks):
        widths.append((ids.shape[1], logp.shape[1]))
        add(self, ids, logp, ranks)

    return noted


def test_requests_with_and_without_kept_ids_share_a_batch(llm):
    more = {"max_tokens": 40, "ignore_eos": True, "detokenize": False, "seed": 3}
    asked = [
        SamplingParams(**recording(2, max_kept=9), **more, top_k=9), parameters(30, arrays=True),
        SamplingParams(**recording(0, max_kept=3), **more, top_k=9), parameters(7, arrays=False),
        SamplingParams(**more), SamplingParams(**recording(4, max_kept=20), **more, top_k=12),
    ]  # fmt: skip
    alone = [llm.generate([p], sampling_params=[a], use_tqdm=False)[0] for p, a in zip(PROMPTS, asked, strict=True)]
    for single, shared in zip(alone, sample(llm, asked), strict=True):
        one, other = single.outputs[0], shared.outputs[0]
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob)
        if isinstance(one.logprobs, DecodedLogprobs):
            np.testing.assert_array_equal(one.logprobs.table()[1], other.logprobs.table()[1])
            assert kept_by(one) == kept_by(other)
    rows = [kept_by(alone[row].outputs[0]) for row in (0, 1, 2, 5)]
    assert rows[1] is None
    assert [{*map(len, rows[row])} for row in (0, 2, 3)] == [{9}, {4}, {12}]  # 4: one more than the limit


def kept_by(completion):
    column = completion.logprobs.kept()
    return None if column is None else [sorted(row) for row in column.rows()]


def test_more_kept_ids_than_the_limit_are_an_error_with_the_figure(llm):
    settings = {"top_k": 8, "max_tokens": 4, "ignore_eos": True}
    fits, over = (sample(llm, SamplingParams(**recording(2, max_kept=n), **settings))[0] for n in (8, 7))
    assert fits.outputs[0].logprobs.kept().counts.tolist() == [8, 8, 8, 8]
    check_limit(fits.outputs[0].logprobs.kept(), 8)
    with pytest.raises(EngineError, match=r"at most 7 ids .* at 4 of 4 tokens.* 72 now"):
        check_limit(over.outputs[0].logprobs.kept(), 7)


def test_kept_ids_are_absent_unless_they_were_asked_for(llm):
    assert sample(llm, parameters(2, arrays=True))[0].outputs[0].logprobs.kept() is None


def test_requests_without_the_mark_get_vllms_own_objects(llm):
    plain = sample(llm, SamplingParams(logprobs=2, max_tokens=3, ignore_eos=True))
    assert type(plain[0].outputs[0].logprobs) is list
    silent = sample(llm, SamplingParams(max_tokens=3, ignore_eos=True, extra_args={REQUEST: True}))
    assert silent[0].outputs[0].logprobs is None  # no log-probs were requested


def test_trls_reader_gets_the_sampled_token_at_every_position(llm):
    recorded = sample(llm, parameters(5, arrays=True))
    tokens = [list(output.outputs[0].token_ids) for output in recorded]
    values, ids = extract_logprobs(recorded)
    assert [[position[0] for position in row] for row in ids] == tokens
    for row, output in zip(values, recorded, strict=True):
        table_ids, table_logp = output.outputs[0].logprobs.table()
        for t, (value,) in enumerate(row):
            assert isinstance(value, RecordedLogprob)
            assert (value.source.table()[0] is not None, value.position) == (True, t)
            assert value == table_logp[t, 0]
    plain = sample(llm, SamplingParams(logprobs=5, max_tokens=40, ignore_eos=True, seed=3, detokenize=False))
    _, ids = extract_logprobs(plain)
    wrong = np.mean(
        [p[0] != t for row, drawn in zip(ids, tokens, strict=True) for p, t in zip(row, drawn, strict=True)]
    )
    assert wrong > 0.1  # vLLM's own lists would have given TRL another token here


def test_a_position_reads_like_vllms(llm):
    ours = sample(llm, parameters(4, arrays=True))[1].outputs[0].logprobs
    theirs = sample(llm, SamplingParams(logprobs=4, max_tokens=40, ignore_eos=True, seed=3))[1].outputs[0].logprobs
    for t in (0, 17, -1):
        assert {i: (p.logprob, p.rank) for i, p in ours[t].items()} == {
            i: (p.logprob, p.rank) for i, p in theirs[t].items()
        }
    part = ours[5:9]
    assert len(part) == 4
    np.testing.assert_array_equal(part.table()[1], ours.table()[1][5:9])
    with pytest.raises(IndexError):
        ours[40]


def test_the_async_engine_in_another_process_returns_the_same(tmp_path):
    """A separate interpreter, because this one's engine lives in the process. vLLM itself loads the plugin."""
    save_model(tmp_path / "model", tied=False)
    script = Path(__file__).with_name("async_record.py")
    path = os.pathsep.join([str(entry_points(tmp_path / "installed")), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "model")], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine_process"] != found["this_process"]
    assert found["kinds"] == {"complete": "DecodedLogprobs", "delta": "DecodedLogprobs", "unmarked": "list"}
    assert found["compared"] == 4 * 6 * 2  # widths, requests, kinds of output


def entry_points(folder):
    """An installed package with trustrl's entry points, as pyproject.toml declares them now."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [line for group, names in declared.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    package = folder / "trustrl_now-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: trustrl-now\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def another_vllm(monkeypatch):
    """A vLLM whose seam has other parameters."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def renamed(self, lists):
        raise AssertionError

    def created(cls, tokenizer, request):
        raise AssertionError

    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", renamed)
    monkeypatch.setattr(LogprobsProcessor, "from_new_request", classmethod(created))
    return created


def test_another_vllm_is_refused_when_trustrl_asks(another_vllm):
    with pytest.raises(
        EngineError, match=r"_update_sample_logprobs must have the parameters .* got \['self', 'lists'\]"
    ):
        install()


def test_the_plugin_leaves_another_vllm_alone(another_vllm, caplog):
    from vllm.v1.engine.logprobs import LogprobsProcessor

    decode_record.plugin()
    assert LogprobsProcessor.from_new_request.__func__ is another_vllm
    (line,) = [record for record in caplog.records if record.name == decode_record.__name__]
    assert "changes nothing: vLLM's LogprobsProcessor._update_sample_logprobs" in line.getMessage()


def test_the_plugin_imports_no_more_of_trustrl_than_the_recorder():
    """Every vLLM process of an environment with trustrl imports it."""
    code = "import sys, trustrl.engines.vllm.decode_record; print(*sorted(m for m in sys.modules if 'trustrl' in m or m == 'torch'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    vllm = "trustrl.engines.vllm"
    common = "trustrl.engines.common"
    fields = [common, f"{common}.kept_columns", f"{common}.sampler_fields"]
    assert done.stdout.split() == [
        "trustrl", "trustrl.engines", *fields, vllm, f"{vllm}.decode_record", "trustrl.errors",
    ]  # fmt: skip


def test_parts_that_vllm_joins_are_the_record():
    """vLLM joins the parts of a stream that its reader has not taken yet."""
    g = np.random.default_rng(0)
    whole = DecodedLogprobs(4, max_kept=3)
    for step in range(9):
        whole.add(g.integers(0, 50, (1, 5)), -g.random((1, 5), dtype=np.float32), np.array([step]))
    joined, end = whole[2:5], whole[5:9]
    joined.extend(end)
    want = whole[2:9]
    assert len(joined) == 7
    for a, b in zip(joined.table(), want.table(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(joined._ranks, want._ranks)
    for a, b in zip(joined.kept(), want.kept(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(whole) == 9
