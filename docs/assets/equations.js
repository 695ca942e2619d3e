// Renders the page's LaTeX with KaTeX. An equation that is wider than the screen scrolls in a marked box.
document.querySelectorAll("div.equation").forEach((box) => {
  katex.render(box.textContent, box, { displayMode: true, fleqn: true, throwOnError: false });
});

function markWideEquations() {
  document.querySelectorAll("div.equation").forEach((box) => {
    const wide = box.scrollWidth > box.clientWidth;
    box.classList.toggle("scrolls", wide);
    wide ? box.setAttribute("tabindex", "0") : box.removeAttribute("tabindex");
    wide ? box.setAttribute("role", "region") : box.removeAttribute("role");
    wide ? box.setAttribute("aria-label", "Equation, scrolls sideways") : box.removeAttribute("aria-label");
  });
}

document.fonts.ready.then(markWideEquations);
window.addEventListener("resize", markWideEquations);
