"""The size rules: files, functions and parameters are counted as CONTRIBUTING.md describes."""

import ast
from pathlib import Path

import house

ROOT = Path(__file__).parents[2]


def found(source, path="trustrl/core/thing.py"):
    return {(one.rule, one.name, one.size) for one in house.offenders_in(source, path)}


def test_nothing_in_the_source_is_over_its_limit():
    texts = house.sources(ROOT / "src/trustrl")
    assert [str(one) for path, text in texts.items() for one in house.offenders_in(text, str(path))] == []


def test_docstrings_comments_and_blank_lines_do_not_count_as_code():
    body = "    x = 1\n\n    # a comment\n" * 60
    docstring = "A line.\n" * 100
    source = f'def f():\n    """{docstring}"""\n{body}'
    assert found(source.replace(body, body[: body.rindex("    x")])) == set()
    assert found(source) == {("function-lines", "f", 61)}


def test_a_function_inside_another_counts_for_itself_alone():
    inner = "    def g():\n" + "        x = 1\n" * 60
    assert found(f"def f():\n{inner}    return g\n") == {("function-lines", "f.g", 61)}


def test_long_statements_and_strings_count_every_line():
    call = "    call(\n" + "        1,\n" * 60 + "    )\n"
    assert found(f"def f():\n{call}") == {("function-lines", "f", 63)}


def test_a_file_over_400_lines_is_found():
    assert found("x = 1\n" * 400) == set()
    assert found("x = 1\n" * 401) == {("file-lines", "thing.py", 401)}


def test_self_is_not_a_parameter_and_stars_are():
    source = "class A:\n    def f(self, a, b, c, d, /, e, *args, g=1, **kwargs): ...\n"
    assert found(source) == {("parameters", "A.f", 8)}
    assert found(source.replace(" g=1,", "")) == set()
    assert found(source, "trustrl/kernels/thing.py") == set()


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
