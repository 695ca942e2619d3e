// Marks boxes that are wider than the screen, so that the keyboard can scroll them, and opens the menu by keyboard.
"use strict";

const SCROLLING = {
  Equation: "div.equation",
  Table: ".md-typeset__scrollwrap",
  Figure: ".md-typeset p:has(> img:only-child)",
};

function markScrollingBoxes() {
  for (const [name, selector] of Object.entries(SCROLLING)) {
    for (const box of document.querySelectorAll(selector)) {
      const wide = box.scrollWidth > box.clientWidth;
      box.classList.toggle("scrolls", wide);
      const marks = { tabindex: "0", role: "region", "aria-label": `${name}, scrolls sideways` };
      for (const [mark, value] of Object.entries(marks)) {
        wide ? box.setAttribute(mark, value) : box.removeAttribute(mark);
      }
    }
  }
}

// The theme's labels for the menu and the search take clicks alone.
for (const label of document.querySelectorAll(".md-header label[for='__drawer'], .md-header label[for='__search']")) {
  label.tabIndex = 0;
  label.setAttribute("role", "button");
  label.setAttribute("aria-label", label.htmlFor === "__drawer" ? "Menu" : "Search");
}

document.fonts.ready.then(markScrollingBoxes);
window.addEventListener("load", markScrollingBoxes);
window.addEventListener("resize", markScrollingBoxes);
