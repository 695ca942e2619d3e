// Renders the page's LaTeX with KaTeX.
document.querySelectorAll("div.equation").forEach((box) => {
  katex.render(box.textContent, box, { displayMode: true, fleqn: true, throwOnError: false });
});
