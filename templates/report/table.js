// The operations of the plan.
function tableSection(place) {
  const detail = element("div", { class: "panel detail", "aria-live": "polite" }, "Choose a row.");
  place.append(detail);
  const sizes = { time_us: (us, i) => showTime(us) + (View.program.operations.estimated[i] ? " ~" : "") };
  const table = sortedTable(place, {
    columns: [["name", "operation"], ["time_us", "time", sizes.time_us], ["kind", "kind"], ["limit_us", "limit", showTime], ["bound", "nearest limit"], ["lost_us", "lost", showTime],
      ...(DATA.measured ? [["measured_us", "measured", showTime], ["off_us", "more than predicted", showTime]] : []),
      ["output_bytes", "writes", showSize], ["workspace_bytes", "workspace", showSize], ["decision", "decision"],
      ["runs", "runs of rows"], ["kernels", "kernel"], ["first_launch", "launch"]],
    sort: "time_us",
    rows: () => View.program.operations,
    searched: ["name", "kind", "kernels", "decision", "bound"],
    summary: (matches) => {
      const o = View.program.operations;
      const copies = matches.filter((i) => isCopy(o, i));
      const us = (rows) => showTime(rows.reduce((sum, i) => sum + o.time_us[i], 0));
      const beside = copies.length ? `; ${copies.length} copies, ${us(copies)} beside them` : "";
      return `${matches.length} of ${o.count}: ${matches.length - copies.length} kernels, ${us(matches.filter((i) => !isCopy(o, i)))}${beside}`;
    },
    last: (name, i) => ["time_us", "limit_us", "lost_us"].includes(name) && isCopy(View.program.operations, i),
    choose: pick,
  });
  function pick(i) {
    detail.replaceChildren(operationDetail(i));
    table.mark(i);
  }
  View.on.operation = (i) => { pick(i); byId("operations").scrollIntoView(); };
  View.listeners.push(() => { detail.replaceChildren("Choose a row."); table.mark(-1); });
}
