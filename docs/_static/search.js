// A browser fetches no page from disk, so Sphinx's search would show no excerpts there. The site's build writes the texts of
// all pages as a script, _static/texts.js, which is loaded when the first result asks for its page.
if (location.protocol === "file:" && location.pathname.endsWith("/search.html")) {
  let texts;
  const load = () => new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "_static/texts.js";
    script.onload = () => resolve(TEXTS);
    script.onerror = reject;
    document.head.append(script);
  });
  window.fetch = async page => {
    const name = page.replace(/^\.\//, "").replace(/\.html$/, "");
    return new Response(`<div role="main">${(await (texts ??= load()))[name]}</div>`);
  };
}
