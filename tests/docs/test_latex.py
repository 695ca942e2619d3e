"""LaTeX of the equations in docstrings. That KaTeX reads every line is tested in a browser, in tests/site."""

import inspect

import latex
import pytest

from trustrl.regions import catalogue

EQUATIONS = [
    inspect.cleandoc(block)
    for module in catalogue()
    for block in (inspect.getdoc(module) or "").split("\n\n")[1:]
    if block.startswith("    ")
]


def test_every_equation_of_a_region_becomes_ascii():
    assert len(EQUATIONS) > 20
    for equation in EQUATIONS:
        assert latex.block(equation).isascii()


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        pytest.param(
            "w = min(r, C),   ℓ = −sg(w) A log π", r"w=\min(r,C)\qquad \ell=-\operatorname{sg}(w)\,A\log\pi", id="loss"
        ),
        pytest.param("M = 0 iff a token is `leaving`", r"M=0\text{ iff a token is }\texttt{leaving}", id="words"),
        pytest.param(
            "KL(π̂‖b) ≤ ε⁺ + δ_mean",
            r"\operatorname{KL}(\hat{\pi}\Vert b)\le\varepsilon^++\delta_\text{mean}",
            id="marks",
        ),
        pytest.param("k ≥ min_ratio", r"k\ge\texttt{min\_ratio}", id="a setting"),
        pytest.param("S_{t−1} ∈ {t : r_t > 1}", r"S_{t-1}\in\{t:r_t>1\}", id="braces"),
    ],
)
def test_a_line_is_translated(equation, expected):
    assert latex.block(equation) == f"```math\n\\begin{{aligned}}\n& {expected}\n\\end{{aligned}}\n```"


def test_a_long_statement_continues_before_a_conjunction():
    rows = list(latex.rows_of("M = 0  iff  (A > 0, r > 1, D > δ⁺)  or  (A < 0, r < 1, D > δ⁻)    (eq. 12)"))
    assert [row[:16] for row in rows] == [r"M=0\ \text{iff }", r"\qquad \text{or "]
    assert rows[1].endswith(r"\qquad \text{(eq. 12)}")


def test_an_unknown_character_raises():
    with pytest.raises(ValueError, match="must have a symbol for '♠'"):
        latex.block("w = ♠")
