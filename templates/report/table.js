"use strict";
// Operations, sorted and searched; a part of the rows at a time, since elements are slow in thousands.
const ROWS = 100;
const COLUMNS = [
  ["name", "operation", (v) => v], ["kind", "kind", (v) => v], ["time_us", "time", showTime], ["limit_us", "limit", showTime],
  ["lost_us", "lost", showTime], ["output_bytes", "writes", showSize], ["workspace_bytes", "workspace", showSize],
  ["decision", "decision", (v) => v], ["micro_batches", "micro-batches", (v) => v], ["kernels", "kernel", (v) => v], ["first_launch", "launch", (v) => v],
];
const NUMBERS = ["time_us", "limit_us", "lost_us", "output_bytes", "workspace_bytes", "first_launch"];

function tableSection(place) {
  let [sort, down, most, wanted] = ["time_us", true, ROWS, ""];
  const search = element("input", { type: "search", placeholder: "search: name, kind, kernel, decision", "aria-label": "search operations",
    oninput: () => { wanted = search.value.toLowerCase(); most = ROWS; fill(); } });
  const count = element("span", { class: "note", role: "status" });
  const head = element("tr");
  const body = element("tbody");
  const more = element("button", { type: "button", onclick: () => { most += 5 * ROWS; fill(); } }, "show more");
  const detail = element("div", { class: "panel detail", "aria-live": "polite" }, "Choose a row.");
  place.append(element("div", { class: "controls" }, search, count), detail,
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), body)), more);
  let chosen = -1;

  const value = (name, i) => {
    const o = View.program.operations;
    if (name !== "lost_us") return o[name][i];
    return o.limit_us[i] === null ? null : o.time_us[i] - o.limit_us[i];
  };

  function fill() {
    const o = View.program.operations;
    const found = [];
    for (let i = 0; i < o.count; i++) {
      const text = `${o.name[i]} ${o.kind[i]} ${o.kernels[i]} ${o.decision[i]}`.toLowerCase();
      if (wanted.split(/\s+/).every((word) => text.includes(word))) found.push(i);
    }
    found.sort((a, b) => {
      const [x, y] = [value(sort, a), value(sort, b)];
      const order = typeof x === "string" ? x.localeCompare(y) : (x || 0) - (y || 0);
      return (down ? -order : order) || a - b;
    });
    const time = found.reduce((sum, i) => sum + o.time_us[i], 0);
    count.textContent = `${found.length} of ${o.count} operations, ${showTime(time)}`;
    head.replaceChildren(...COLUMNS.map(([name, title]) => {
      const number = NUMBERS.includes(name);
      const act = () => { [sort, down] = [name, sort === name ? !down : number]; fill(); };
      return element("th", { class: number ? "number" : null, scope: "col", "aria-sort": sort === name ? (down ? "descending" : "ascending") : null },
        element("button", { type: "button", onclick: act }, sort === name ? `${title} ${down ? "▾" : "▴"}` : title));
    }));
    body.replaceChildren(...found.slice(0, most).map((i) => {
      const row = element("tr", { tabindex: "0", class: i === chosen ? "chosen" : null }, ...COLUMNS.map(([name, , show]) =>
        element("td", { class: NUMBERS.includes(name) ? "number" : ["name", "kind", "kernels"].includes(name) ? "name" : null },
          show(value(name, i)) + (name === "time_us" && o.estimated[i] ? " ~" : ""))));
      const act = () => pick(i);
      row.addEventListener("click", act);
      row.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
      return row;
    }));
    more.hidden = found.length <= most;
  }

  function pick(i) {
    chosen = i;
    detail.replaceChildren(operationDetail(i));
    fill();
  }
  View.on.operation = (i) => { pick(i); byId("operations").scrollIntoView(); };
  View.listeners.push(() => { chosen = -1; detail.replaceChildren("Choose a row."); fill(); });
  fill();
}
