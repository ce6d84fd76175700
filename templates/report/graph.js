// The network: operations by depth from left to right. Those up to the loss are above; those of the backward pass and
// the update are below, each beneath the forward operation whose values it reads. Lines are values.
const FLOWING = ["inputs", "activations", "gradients"]; // kinds whose flow is drawn; states are read everywhere

function graphSection(place) {
  let by = "time";
  const keys = element("div");
  const map = element("div");
  const detail = element("div", { class: "panel detail", "aria-live": "polite" }, "Choose an operation.");
  place.append(element("div", { class: "controls" },
    select("colour by", [["time", "time"], ["memory", "memory written"], ["decision", "decision"]], (value) => { by = value; colours(); })),
    keys, map, detail);
  let edges = [];
  let layout = null;
  const chart = new Chart(map, {
    label: "operations as a graph", height: 300, left: 12, wide: true, near: 2,
    x: { low: 0, high: 1 }, y: { low: -1, high: 1 },
    describe: (i) => {
      const o = View.program.operations;
      return `${short(o.name[i])}\n${o.kind[i]}, ${showTime(o.time_us[i])}, writes ${showSize(o.output_bytes[i])}, ${o.decision[i]}`;
    },
    choose: (i) => { detail.replaceChildren(operationDetail(i)); chart.draw(); },
    under: (self, pen) => lines(self, pen),
  });

  function lines(self, pen) {
    if (!layout) return;
    const { x0, x1, y0, y1 } = self.items;
    const visible = ([a, b]) => x1[b] >= self.view.x0 && x0[a] <= self.view.x1;
    const shown = edges.filter(visible);
    for (const chosen of [false, true]) {
      pen.strokeStyle = colour(chosen ? "accent" : "line");
      pen.lineWidth = chosen ? 1.6 : 0.8;
      pen.beginPath();
      for (const [a, b] of shown) {
        if ((a === self.chosen || b === self.chosen) !== chosen) continue;
        const [ax, ay, bx, by_] = [self.px((x0[a] + x1[a]) / 2), self.py((y0[a] + y1[a]) / 2), self.px((x0[b] + x1[b]) / 2), self.py((y0[b] + y1[b]) / 2)];
        pen.moveTo(ax, ay);
        // A line that crosses other operations of its row is bent.
        if (Math.abs(ay - by_) < 2 && Math.abs(bx - ax) > 1.5 * (self.px(1) - self.px(0))) {
          pen.quadraticCurveTo((ax + bx) / 2, ay - Math.min(30, 6 + Math.abs(bx - ax) / 6), bx, by_);
        } else pen.lineTo(bx, by_);
      }
      pen.stroke();
    }
  }

  function placeNodes() {
    const { operations: o, pieces: p, launches, loss_launch } = View.program;
    const written = new Map(); // by value, the operations that write it
    const read = new Map();
    for (let n = 0; n < p.count; n++) {
      if (!FLOWING.includes(p.kind[n])) continue;
      for (const [operations, at] of [[written, p.writers[n]], [read, p.readers[n]]]) {
        if (!operations.has(p.value[n])) operations.set(p.value[n], new Set());
        for (const launch of at) operations.get(p.value[n]).add(launches.operation[launch]);
      }
    }
    edges = [];
    const before = Array.from({ length: o.count }, () => []);
    for (const [value, sources] of written) {
      for (const a of sources) for (const b of read.get(value) || []) if (o.first_launch[a] < o.first_launch[b]) { edges.push([a, b]); before[b].push(a); }
    }
    const forward = o.first_launch.map((at) => loss_launch === null || at <= loss_launch);
    const depth = new Array(o.count).fill(0);
    const order = [...Array(o.count).keys()].sort((a, b) => o.first_launch[a] - o.first_launch[b]);
    let deepest = 0;
    for (const i of order) {
      const [ahead, behind] = [before[i].filter((j) => forward[j]), before[i].filter((j) => !forward[j])];
      if (forward[i]) depth[i] = ahead.reduce((most, j) => Math.max(most, depth[j] + 1), 0);
      else if (ahead.length) depth[i] = ahead.reduce((most, j) => Math.max(most, depth[j]), 0);
      else if (behind.length) depth[i] = behind.reduce((least, j) => Math.min(least, depth[j]), Infinity);
      else depth[i] = deepest;
      deepest = Math.max(deepest, depth[i]);
    }
    // An operation that reads no value (a copy back from elsewhere) is above the first operation that needs it.
    const readers = new Map();
    for (const [a, b] of edges) if (!readers.has(a) || o.first_launch[b] < o.first_launch[readers.get(a)]) readers.set(a, b);
    for (const i of order) if (!before[i].length && readers.has(i)) depth[i] = depth[readers.get(i)];
    const lanes = [new Map(), new Map()];
    const row = order.reduce((rows, i) => {
      const side = lanes[forward[i] ? 0 : 1];
      const lane = side.get(depth[i]) || 0;
      side.set(depth[i], lane + 1);
      rows[i] = forward[i] ? 1 + lane : -1 - lane;
      return rows;
    }, []);
    const up = row.reduce((most, y) => Math.max(most, y), 1);
    const low = row.reduce((least, y) => Math.min(least, y), 0);
    layout = { depth, row };
    chart.options.height = Math.min(460, 40 + 26 * (up - low + 2));
    chart.set({
      count: o.count,
      x0: depth.map((d) => d + 0.12), x1: depth.map((d) => d + 0.88),
      y0: row.map((y) => y - 0.32), y1: row.map((y) => y + 0.32),
      colours: new Array(o.count).fill("kept"),
    }, { low: 0, high: deepest + 1, title: "" }, { low: low - 0.6, high: up + 0.6 });
  }

  function colours() {
    const o = View.program.operations;
    const column = by === "time" ? o.time_us : o.output_bytes;
    const beside = (i) => by === "time" && isCopy(o, i); // longer than kernels, which hide most of it
    const top = column.reduce((most, v, i) => (beside(i) ? most : Math.max(most, v)), 0) || 1;
    // On a square root, because the largest is many times most others.
    chart.items.colours = by === "decision" ? o.decision
      : column.map((v, i) => { if (beside(i)) return "offloaded"; const s = Math.sqrt(v / top); return `hsl(${Math.round(215 - 205 * s)} ${Math.round(35 + 45 * s)}% ${Math.round(62 - 12 * s)}%)`; });
    keys.replaceChildren(by === "decision" ? legend(DECISIONS.map((d) => [d, d]))
      : element("p", { class: "note" }, by === "time" ? `blue: nothing; red: ${showTime(top)}, the most of one kernel; violet: copies beside them`
        : `blue: nothing; red: ${showSize(top)}, the most of one operation`));
    chart.draw();
  }
  const fill = () => { placeNodes(); colours(); };
  View.listeners.push(fill);
  fill();
}
