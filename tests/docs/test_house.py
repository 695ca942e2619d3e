"""The size rules: files, functions and parameters are counted as CONTRIBUTING.md describes."""

import ast
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[2]


def sizes_over(source, path="trustrl/core/thing.py"):
    return {(x.rule, x.name, x.size) for x in house.offenders_in(source, path)}


@pytest.mark.parametrize("package", house.PACKAGES, ids=lambda package: package.name)
def test_nothing_in_the_source_is_over_its_limit(package):
    texts = house.sources(package)
    assert texts
    assert [str(x) for path, text in texts.items() for x in house.offenders_in(text, str(path))] == []


def test_docstrings_comments_and_blank_lines_do_not_count_as_code():
    body = "    x = 1\n\n    # a comment\n" * 60
    docstring = "A line.\n" * 100
    source = f'def f():\n    """{docstring}"""\n{body}'
    assert sizes_over(source.replace(body, body[: body.rindex("    x")])) == set()
    assert sizes_over(source) == {("function-lines", "f", 61)}


def test_a_file_that_a_script_writes_may_have_long_functions_and_not_more_lines():
    source = '"""Sums.\n\nWritten by `python scripts/sums.py` from a table.\n"""\ndef f():\n' + "    x = 1\n" * 61
    assert sizes_over(source) == set()
    assert sizes_over(source.replace("Written", "Edited")) == {("function-lines", "f", 62)}
    assert {over[0] for over in sizes_over(source + "x = 1\n" * 400)} == {"file-lines"}


def test_a_function_inside_another_counts_for_itself_alone():
    inner = "    def g():\n" + "        x = 1\n" * 60
    assert sizes_over(f"def f():\n{inner}    return g\n") == {("function-lines", "f.g", 61)}


def test_long_statements_and_strings_count_every_line():
    call = "    call(\n" + "        1,\n" * 60 + "    )\n"
    assert sizes_over(f"def f():\n{call}") == {("function-lines", "f", 63)}


def test_a_file_over_400_lines_is_found():
    assert sizes_over("x = 1\n" * 400) == set()
    assert sizes_over("x = 1\n" * 401) == {("file-lines", "thing.py", 401)}


def test_self_is_not_a_parameter_and_stars_are():
    source = "class A:\n    def f(self, a, b, c, d, /, e, *args, g=1, **kwargs): ...\n"
    assert sizes_over(source) == {("parameters", "A.f", 8)}
    assert sizes_over(source.replace(" g=1,", "")) == set()
    assert sizes_over(source, "trustrl/kernels/thing.py") == set()


def test_every_exempt_signature_exists():
    names = {
        name for text in house.sources(ROOT / "src/trustrl").values() for name, _ in house.functions(ast.parse(text))
    }
    assert set(house.DICTATED) <= names


def test_the_table_has_a_row_for_each_folder_and_one_for_all():
    texts = {Path("a/x.py"): "x\n" * 10, Path("a/b/y.py"): "x\n" * 30, Path("z.py"): "x\n" * 50}
    _, top, a, everything = house.table(texts).splitlines()
    assert top.split() == ["(top)", "1", "50", "50", "50", "0"]
    assert a.split() == ["a", "2", "40", "20", "30", "2"]
    assert everything.split() == ["all", "3", "90", "30", "50", "2"]


def test_the_counts_of_vague_names_may_only_fall():
    """Equal, so that a lowered count is written down and cannot rise again."""
    texts = [text for package in house.PACKAGES for text in house.sources(package).values()]
    assert house.vague_names(texts) == house.VAGUE


def test_a_name_counts_wherever_it_is_bound():
    source = "def f(at):\n    found = at.found\n    for one in (given := found):\n        print(one, found)\n"
    assert house.vague_names([source]) == {"found": 1, "one": 1, "given": 1, "at": 1}
