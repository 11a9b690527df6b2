// Print the pages of the first three results for a query: node first.js FOLDER-OF-THE-SITE QUERY
// Runs the scripts of the search page in the order in which that page loads them.
const fs = require("fs");
const vm = require("vm");

const [site, query] = process.argv.slice(2);
const page = vm.createContext({
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready: () => {},
  document: { getElementById: () => null },
});
page.window = page;
for (const name of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"]) {
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8"), page, { filename: name });
}
page.query = query;
const found = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", page);
const first = found.reverse().slice(0, 3); // results are taken from the end of the list
console.log(first.map((result) => result[0]).join("\n"));
