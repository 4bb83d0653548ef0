// Renders the formulas that arithmatex marked, once KaTeX and the page are there.
document.addEventListener("DOMContentLoaded", () => {
  if (!window.katex) return;
  for (const element of document.querySelectorAll(".arithmatex")) {
    const displayMode = element.tagName === "DIV";
    const tex = element.textContent.trim().slice(2, -2);
    try {
      katex.render(tex, element, { displayMode });
    } catch {
      // KaTeX marks a formula that it cannot parse, but not one with an unknown command.
      katex.render(tex, element, { displayMode, throwOnError: false });
      element.classList.add("katex-error");
    }
  }
});
