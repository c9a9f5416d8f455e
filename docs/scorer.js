// The order of what a search finds: walkthroughs come first, since they explain; then pages, and the API last.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => score + (page.startsWith("notebooks/") ? 100 : page.startsWith("api/") ? 0 : 20),
};
