"""The page of the sampler contract is what its script writes, and no row of it failed."""

import json

import sampler_contract


def test_the_page_is_what_the_script_writes():
    assert sampler_contract.PAGE.read_text() == sampler_contract.page(json.loads(sampler_contract.DATA.read_text()))


def test_every_row_passed_or_says_why_it_cannot():
    results = json.loads(sampler_contract.DATA.read_text())["results"]
    for sampler in results.values():
        assert len(sampler["rows"]) >= 20
        for name, row in sampler["rows"].items():
            assert row["result"] == "passed" or (row["result"] == "cannot" and row["note"]), name


def test_results_of_several_engines_are_one_column():
    rows = [{"row": "a", "result": "passed", "figure": 5e-6, "unit": "nats", "note": ""}]
    refused = [{"row": "b", "result": "cannot", "note": "it has no such kernel"}]
    data = {"results": {"vLLM 0.1": {"rows": {"a": {"result": "failed"}}}}}
    files = [Part({"sampler": "vllm", "version": "0.1", "rows": rows}), Part({"sampler": "vllm", "rows": refused})]
    table = sampler_contract.results(sampler_contract.merged(data, files)["results"])
    assert "| row | vLLM 0.1 |" in table
    assert "| a | passed, 5e-6 |" in table
    assert "| b | cannot (1) |\n\n1. it has no such kernel." in table


class Part:
    def __init__(self, content):
        self.content = content

    def read_text(self):
        return json.dumps(self.content)
