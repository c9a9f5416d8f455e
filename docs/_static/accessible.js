// What the theme leaves out for readers by keyboard and ear; and a button that stops the moving picture.
function focusWhatScrolls() {
  for (const box of document.querySelectorAll("article :is(pre, .output, .math, .table-wrapper)"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; else box.removeAttribute("tabindex");
}
for (const event of ["load", "resize"]) addEventListener(event, focusWhatScrolls);
document.addEventListener("toggle", focusWhatScrolls, true);

addEventListener("DOMContentLoaded", () => {
  const name = (selector, words) => document.querySelector(selector)?.setAttribute("aria-label", words);
  name("aside.sidebar-drawer", "Pages of the site");
  name("aside.toc-drawer", "Parts of this page");

  const picture = document.querySelector('img[src$="played_step.svg"]');
  if (!picture || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const button = document.createElement("button"), moving = picture.src;
  button.type = "button";
  button.className = "still";
  button.textContent = "Stop the picture";
  button.addEventListener("click", () => {
    const still = picture.src !== moving;
    picture.src = still ? moving : `${moving}#still`;
    button.textContent = still ? "Stop the picture" : "Let the picture move";
  });
  picture.after(button);
});
