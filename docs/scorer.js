// The order of what a search finds. The site's build puts QUESTIONS before this: [question, page that answers it].
const ASKED = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/[^\w]+/).filter(Boolean);
const ANSWERS = new Set(QUESTIONS.filter(([question]) => {
  const words = question.toLowerCase().split(/[^\w]+/);
  return ASKED.length > 1 && ASKED.every(asked => words.some(word => word.startsWith(asked.replace(/s$/, ""))));
}).map(([, page]) => page));
// A page that answers a question with these words comes first; then walkthroughs, since they explain; the API is last.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) =>
    score + (ANSWERS.has(page) ? 200 : page.startsWith("notebooks/") ? 100 : page.startsWith("api/") ? 0 : 20),
};
