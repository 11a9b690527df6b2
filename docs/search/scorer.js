// How the site's search ranks pages: those that say how to do something before those that say why.
// Scores of Sphinx: 15 for a word in a heading, 5 in text, 11 for an object's name, 6 for a part of
// one. What is added here is larger than these, so that it decides.
const KINDS_OF_PAGES = [ // the first that a page's name begins with
  ["docs/guides/", 30],
  ["docs/start", 30],
  ["docs/coming-from/", 25],
  ["docs/how/", 15],
  ["packages/", 15],
  ["docs/api/zero_engine", 3],
  ["docs/api/", 0],
  ["docs/decisions/", -20],
  ["docs/measured", -10],
  ["docs/index", -20], // only links to pages that are found themselves
  ["docs/", 10],
];
var Scorer = {
  score: ([page, , , , score, , kind]) => {
    if (page.endsWith("CHANGELOG")) return score - 30;
    const [, added] = KINDS_OF_PAGES.find(([start]) => page.startsWith(start)) || ["", 0];
    if (kind === "index") return added; // the index has names, which are found as objects
    if (kind === "title") return score + added + 10; // the whole query is in a heading
    if (kind === "object" && score >= Scorer.objNameMatch) return score + added + 30;
    return score + added;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
