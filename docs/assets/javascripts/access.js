// Two repairs for readers who do not use a mouse: what scrolls can be reached by keyboard, and
// the theme's boxes of code buttons, all alike, are not announced as places to navigate to.
const SCROLLING = "div.arithmatex, .highlight-ipynb, .md-typeset__scrollwrap";
const article = document.querySelector("article");

function repair() {
  for (const box of article.querySelectorAll("nav.md-code__nav:not([role])")) {
    box.setAttribute("role", "none");
  }
  for (const box of article.querySelectorAll(SCROLLING)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

new MutationObserver(repair).observe(article, { childList: true, subtree: true });
addEventListener("resize", repair);
repair();
