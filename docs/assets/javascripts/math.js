// Renders the formulas that arithmatex marked, once KaTeX and the page are there.
document.addEventListener("DOMContentLoaded", () => {
  if (!window.katex) return;
  for (const element of document.querySelectorAll(".arithmatex")) {
    const displayMode = element.tagName === "DIV";
    const tex = element.textContent.trim().slice(2, -2);
    katex.render(tex, element, { displayMode, throwOnError: false });
    if (displayMode && element.scrollWidth > element.clientWidth) element.tabIndex = 0;
  }
});
