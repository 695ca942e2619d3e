"""The site's search, asked by its own worker in a real browser: each question finds its page among the first three."""

import json
import tomllib
from pathlib import Path
from string import ascii_lowercase

ROOT = Path(__file__).parents[2]
QUESTIONS = tomllib.loads((Path(__file__).parent / "questions.toml").read_text())
FOUND = """async ([worker, index, questions]) => {
  const search = new Worker(worker);
  const ask = (type, data) => new Promise((answer) => {
    search.addEventListener("message", (message) => answer(message.data.data), {once: true});
    search.postMessage({type, data});
  });
  await ask(0, {...index, options: {suggest: false}});
  const found = [];
  for (const question of questions) {
    const {items} = await ask(2, question);
    found.push(items.slice(0, 3).map((sections) => sections[0].location.split("#")[0]));
  }
  return found;
}"""


def answers(opened, questions):
    """The first three pages for each question. The search's errors are warnings of the page, which `opened` refuses."""
    tab = opened("concepts/four-policies/")
    settings = json.loads(tab.locator("script#__config").text_content())
    worker = tab.evaluate("(path) => new URL(path, location.href).href", settings["search"])
    index = json.loads((ROOT / "build/site/search/search_index.json").read_text())
    return dict(zip(questions, tab.evaluate(FOUND, [worker, index, questions]), strict=True))


def test_each_question_finds_its_page_among_the_first_three(opened, address):
    assert len(QUESTIONS) >= 40
    pages = answers(opened, list(QUESTIONS))
    missed = {
        question: pages[question] for question, wanted in QUESTIONS.items() if not set(wanted) & set(pages[question])
    }
    assert missed == {}


def test_the_search_raises_at_no_beginning_of_a_word(opened, address):
    """lunr raises if two of its states have the same name by chance, and then finds nothing for their beginning."""
    pages = answers(opened, [first + second for first in ascii_lowercase for second in ascii_lowercase])
    assert pages["kl"]


def test_every_page_that_the_search_names_is_there(address):
    names = tomllib.loads((ROOT / "scripts/search.toml").read_text())
    index = json.loads((ROOT / "build/site/search/search_index.json").read_text())
    built = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in [*names["tags"], *names["boost"]]:
        assert any(place.startswith(page.removesuffix(".md").removesuffix("index")) for place in built), page
