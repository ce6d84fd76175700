// Rows, sorted and searched; only some are shown at a time, because thousands of elements are slow. options: columns as
// [field, title, show], sort, rows() as columns, searched fields, summary(matches), order(value), last(field, i),
// choose(i); rows for which `last` holds are below the others in both directions
const ROWS = 100;
function sortedTable(place, options) {
  let [sort, down, most, wanted, chosen] = [options.sort, true, ROWS, "", -1];
  const search = element("input", { type: "search", placeholder: `search: ${options.searched.join(", ")}`, "aria-label": "search operations",
    oninput: () => { wanted = search.value.toLowerCase(); most = ROWS; fill(); } });
  const count = element("span", { class: "note", role: "status" });
  const head = element("tr");
  const body = element("tbody");
  const more = element("button", { type: "button", onclick: () => { most += 5 * ROWS; fill(); } }, "show more");
  place.append(element("div", { class: "controls" }, search, count),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table of operations" },
      element("table", {}, element("thead", {}, head), body)), more);

  function fill() {
    const rows = options.rows();
    const matches = [];
    const words = wanted.split(/\s+/);
    for (let i = 0; i < rows.count; i++) {
      const text = options.searched.map((name) => rows[name][i]).join(" ").toLowerCase();
      if (words.every((word) => text.includes(word))) matches.push(i);
    }
    const order = options.order || ((value) => value);
    const last = options.last || (() => false);
    matches.sort((a, b) => {
      const below = last(sort, a) - last(sort, b);
      if (below) return below;
      const [x, y] = [order(rows[sort][a]), order(rows[sort][b])];
      const less = typeof x === "string" ? (x < y ? -1 : x > y ? 1 : 0) : (x || 0) - (y || 0);
      return (down ? -less : less) || a - b;
    });
    count.textContent = options.summary(matches);
    const numeric = (name) => rows.count > 0 && typeof rows[name].find((value) => value !== null) === "number";
    head.replaceChildren(...options.columns.map(([name, title]) => {
      const act = () => { [sort, down] = [name, sort === name ? !down : numeric(name)]; fill(); };
      return element("th", { class: numeric(name) ? "number" : null, scope: "col", "aria-sort": sort === name ? (down ? "descending" : "ascending") : null },
        element("button", { type: "button", onclick: act }, sort === name ? `${title} ${down ? "▾" : "▴"}` : title));
    }));
    const [title] = options.columns[0];
    const shown = matches.slice(0, most);
    const within = shown.includes(chosen) ? chosen : shown[0]; // the row that Tab reaches; arrows move from there
    const focused = body.contains(document.activeElement);
    body.replaceChildren(...shown.map((i) => {
      const row = element("tr", { tabindex: options.choose ? (i === within ? "0" : "-1") : null, class: i === chosen ? "chosen" : null,
        "aria-label": options.choose ? String(rows[title][i]) : null, "aria-current": i === chosen ? "true" : null },
        ...options.columns.map(([name, , show]) => {
          const text = String(show ? show(rows[name][i], i) : rows[name][i]);
          // The first cell is identified by its end: bdi keeps its order if the cell is cut at its start.
          return element("td", { class: numeric(name) ? "number" : "name", title: text.length > 30 ? text : null },
            name === options.columns[0][0] ? element("bdi", {}, text) : text);
        }));
      if (options.choose) {
        row.addEventListener("click", () => options.choose(i));
        row.addEventListener("keydown", (event) => {
          const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
          if (event.key === "Enter") options.choose(i);
          else if (next) next.focus();
          else return;
          event.preventDefault();
        });
      }
      return row;
    }));
    if (focused) body.querySelector("[tabindex='0']")?.focus();
    more.hidden = matches.length <= most;
  }
  fill();
  return { fill, mark: (i) => { chosen = i; fill(); } };
}
