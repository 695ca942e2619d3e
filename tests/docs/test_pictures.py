"""Pictures of the concepts: the files are what the script draws, and each stands on one page with a description."""

import re
from pathlib import Path

import pictures
import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [file.read_text(encoding="utf-8") for file in DOCS.glob("**/*.md")]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_again_alike_and_described_on_its_page(name):
    file = pictures.FOLDER / f"{name}.svg"
    assert file.read_text(encoding="utf-8") == pictures.PICTURES[name](), "Run `python scripts/pictures.py`."
    (alt,) = (alt for text in TEXTS for alt in re.findall(rf"!\[(.+?)\]\([./]*figures/{name}\.svg\)", text))
    assert len(alt) > 100


def test_the_projection_lies_on_the_edge_of_the_ball():
    assert pictures.kl(pictures.projected()) == pytest.approx(pictures.KL, abs=1e-6)
    assert pictures.kl(pictures.POLICY) > pictures.KL
    for edge in pictures.ball():
        assert min(edge) >= 0
        assert sum(edge) == pytest.approx(1)
        assert pictures.kl(edge) == pytest.approx(pictures.KL, abs=1e-9)
