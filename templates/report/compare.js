// The page of two plans: live bytes side by side on one scale, and a table of operations that differ.
(function curves() {
  const top = DATA.sides.reduce((most, side) => Math.max(most, side.arena_bytes), 0) || 1;
  byId("keys").append(legend(DATA.kinds.map((kind, i) => [`c${i}`, kind])));
  for (const side of DATA.sides) {
    const total = [];
    for (const taken of Object.values(side.memory)) taken.forEach((bytes, i) => (total[i] = (total[i] || 0) + bytes));
    byId("curves").append(element("div", {}, element("h3", {}, side.title),
      memoryCurve({ memory: side.memory, total, peak: side.peak, count: total.length, left: side.left_bytes }, (i) => i, top, 480)));
  }
})();

(function table() {
  const rows = columnsOf(DATA.changes);
  rows.delta = rows.after_us.map((us, i) => us - rows.before_us[i]);
  const marked = (estimated) => (us, i) => (estimated[i] ? "~" : "") + showTime(us);
  const signed = (us) => (us > 0 ? `+${showTime(us)}` : showTime(us));
  sortedTable(byId("changes"), {
    columns: [["name", "operation"], ["delta", "change", signed], ["program", "program"], ["kind", "kind"], ["what", "differs"],
      ["before", "first"], ["after", "second"], ["before_us", "time, first", marked(rows.before_estimated)],
      ["after_us", "time, second", marked(rows.after_estimated)]],
    sort: "delta",
    rows: () => rows,
    searched: ["name", "program", "kind", "what", "before", "after"],
    order: (value) => (typeof value === "number" ? Math.abs(value) : value),
    last: (_, i) => rows.program[i] !== "train",
    summary: (matches) => {
      const parts = [["training step", "train", false], ["copies beside it", "train", true], ["inference", "infer", false]].map(([title, program, copy]) => {
        const sums = matches.filter((i) => rows.program[i] === program && rows.copy[i] === copy).map((i) => rows.delta[i]);
        return sums.length ? `; ${title} ${signed(sums.reduce((sum, us) => sum + us, 0))}` : "";
      });
      return `${matches.length} of ${rows.count}${parts.join("")}`;
    },
  });
  document.documentElement.dataset.ready = "yes";
})();
