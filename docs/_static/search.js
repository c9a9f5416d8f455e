// What a search shows of the pages that it finds. A browser fetches no page from disk, so the site's build writes the texts of all
// pages as a script, _static/texts.js, which is loaded when the first result asks for its page. Labels of folded parts are no text.
if (location.pathname.endsWith("/search.html")) {
  let texts;
  const load = () => new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "_static/texts.js";
    script.onload = () => resolve(TEXTS);
    script.onerror = reject;
    document.head.append(script);
  });
  const fetched = window.fetch;
  window.fetch = async page => {
    if (location.protocol === "file:") {
      const name = page.replace(/^\.\//, "").replace(/\.html$/, "");
      return new Response(`<div role="main">${(await (texts ??= load()))[name]}</div>`);
    }
    return new Response((await (await fetched(page)).text()).replace(/<summary\b.*?<\/summary>/gs, ""));
  };
}
