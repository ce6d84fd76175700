// Each kernel's time against its limit: the diagonal is the roofline, and the distance above it is lost time.
const LEAST = -2; // decades of us: smaller limits are drawn here, because a launch alone takes a hundred times as long

function rooflineSection(place) {
  const { ceilings, floor } = DATA;
  if (!ceilings) {
    place.append(element("p", {}, "A plan in fp64 does not run on a GPU, so it has no roofline."));
    return;
  }
  const source = ceilings.measured ? "measured" : "of the datasheet";
  place.append(element("p", { class: "note" },
    `Ceilings (${source}): ${showRate(ceilings.bytes_per_us / 1e3)} GB/s of copying, ${showRate(ceilings.flops_per_us / 1e6)} TFLOP/s of ` +
    `${PLAN.precision}${ceilings.in_halves ? ", emulated by fp16 tensor-core products" : ""}. The limit of an operation is the longer of its bytes ` +
    "and its arithmetic at these ceilings. The distance above the diagonal is lost time."));
  const sums = element("p");
  const map = element("div");
  const detail = element("div", { class: "panel detail", "aria-live": "polite" }, "Choose an operation.");
  place.append(legend([["c6", "nearest limit: memory"], ["c0", "arithmetic"], ["c3", "link"]]), sums, map, detail);
  let shown = [];
  const decades = (low, high) => {
    const powers = [];
    for (let at = Math.ceil(low); at <= high; at++) powers.push(at);
    return powers;
  };
  const axis = { low: 0, high: 1, show: (at) => showTime(10 ** at) };
  const chart = new Chart(map, {
    label: "time of operations over their limit, on logarithmic axes",
    height: 380, near: 4,
    x: { ...axis, title: "limit →; time ↑" },
    y: { ...axis },
    describe: (n) => {
      const o = View.program.operations;
      const i = shown[n];
      return `${short(o.name[i])}\n${showTime(o.time_us[i])}, ${(o.time_us[i] / o.limit_us[i]).toFixed(2)} times its limit of ` +
        `${showTime(o.limit_us[i])} (${o.bound[i]})\nloses ${showTime(o.time_us[i] - o.limit_us[i])}`;
    },
    choose: (n) => detail.replaceChildren(operationDetail(shown[n])),
    under: (self, pen) => {
      pen.strokeStyle = colour("faint");
      pen.beginPath();
      pen.moveTo(self.px(-9), self.py(-9));
      pen.lineTo(self.px(9), self.py(9));
      pen.stroke();
    },
  });
  chart.options.x.ticks = () => decades(chart.view.x0, chart.view.x1);
  chart.options.y.ticks = () => decades(chart.view.y0, chart.view.y1);

  function fill() {
    const o = View.program.operations;
    shown = [];
    for (let i = 0; i < o.count; i++) if (o.limit_us[i] > 0 && o.time_us[i] > 0 && !isCopy(o, i)) shown.push(i);
    const xs = shown.map((i) => Math.max(LEAST, Math.log10(o.limit_us[i])));
    const ys = shown.map((i) => Math.log10(o.time_us[i]));
    const low = Math.floor(Math.min(0, ...bounds(ys)));
    const high = Math.max(1, ...bounds(xs), ...bounds(ys)) + 0.1;
    const [dx, dy] = [0.004 * (high - low), 0.009 * (high - low)];
    const name = { memory: "c6", arithmetic: "c0", link: "c3" };
    chart.set({
      count: shown.length,
      x0: xs.map((x) => x - dx), x1: xs.map((x) => x + dx), y0: ys.map((y) => y - dy), y1: ys.map((y) => y + dy),
      colours: shown.map((i) => name[o.bound[i]]),
    }, { ...chart.options.x, low: LEAST - 0.1, high }, { ...chart.options.y, low, high });
    const sum = (column) => shown.reduce((total, i) => total + column[i], 0);
    const [time, limit] = [sum(o.time_us), sum(o.limit_us)];
    sums.textContent = `All kernels, serially: ${showTime(time)}, ${(time / limit).toFixed(2)} times the sum of their limits, ${showTime(limit)}.` +
      (floor && View.name === "train" ? ` That is ${(time / floor.total_us).toFixed(2)} times the floor of the network, ${showTime(floor.total_us)}.` : "");
  }
  const bounds = (list) => (list.length ? [list.reduce((a, b) => Math.min(a, b)), list.reduce((a, b) => Math.max(a, b))] : []);
  View.listeners.push(fill);
  fill();
}

function operationDetail(i) {
  const o = View.program.operations;
  const rows = [
    ["operation", o.name[i]], ["kind", o.kind[i]], ["kernel", o.kernels[i]],
    ["time", `${showTime(o.time_us[i])}${o.estimated[i] ? " (estimated)" : ""}, ${((100 * o.time_us[i]) / View.program.us).toFixed(2)} % of the program`],
  ];
  if (o.limit_us[i] !== null) {
    rows.push(["limit", `${showTime(o.limit_us[i])}, ${(o.time_us[i] / o.limit_us[i]).toFixed(2)} times that taken; the nearest is ${o.bound[i]}: ${showSize(o.moved_bytes[i])} moved, ${showCount(o.flops[i])} flops`],
      ["lost", showTime(o.time_us[i] - o.limit_us[i])]);
  }
  rows.push(["decision", o.decision[i]], ["runs of rows", o.runs[i]], ["layouts", o.layouts[i]],
    ["writes", `${showSize(o.output_bytes[i])}, with ${showSize(o.workspace_bytes[i])} of workspace`],
    ["first launch", `${o.first_launch[i]}, on ${o.stream[i]}`]);
  if (o.source[i]) rows.push(["source, line", o.source[i]]);
  const p = View.program.pieces;
  const own = [];
  for (let n = 0; n < p.count && own.length < 8; n++) {
    if (p.value[n] && p.writers[n].some((launch) => View.program.launches.operation[launch] === i)) own.push(n);
  }
  if (own.length) {
    rows.push(["values in the map", ...own.flatMap((n, k) => [k ? ", " : "",
      element("button", { class: "link", type: "button", onclick: () => { View.on.piece(n); byId("memory").scrollIntoView(); } }, short(p.value[n]))])]);
  }
  return pairs(rows);
}
