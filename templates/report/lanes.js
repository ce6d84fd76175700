// Launches by stream over predicted time, with the waits of each. Below each stream is its measured one, and below all
// are the streams of ranks that run another plan.
function lanesSection(place) {
  const keys = element("div");
  const map = element("div");
  const detail = element("div", { class: "panel detail", "aria-live": "polite" }, "Choose a launch.");
  const sums = element("p", { class: "note" });
  place.append(keys, sums, map, detail);
  let streams = [];
  let lanes = []; // those of the chart, from above
  let items = [];
  let chosen = -1;
  const others = DATA.others.map((other) => ({
    ranks: other.ranks, gpu: other.gpu, operations: columnsOf(other.operations), launches: columnsOf(other.launches),
  }));
  const chart = new Chart(map, {
    label: `launches by stream over ${DATA.measured ? "predicted and measured" : "predicted"} time`,
    height: 170, wide: true, left: (pen) => lanes.reduce((most, lane) => Math.max(most, pen.measureText(lane).width), 60) + 10,
    x: { low: 0, high: 1, show: showTime, title: DATA.measured ? "time" : "predicted time" },
    y: { low: 0, high: 1, show: (y) => lanes[Math.round(lanes.length - 0.5 - y)] || "", ticks: () => lanes.map((_, n) => lanes.length - n - 0.5) },
    describe: (n) => describe(items[n]),
    choose: (n) => choose(items[n]),
    over: (self, pen) => waits(self, pen),
  });

  // The GPU of each rank's streams: labels of streams name the rank only.
  function ranksShown() {
    if (!others.length) return [];
    const named = [[`streams without a rank: ${PLAN.ranks}`, PLAN.target.gpu], ...others.map((other) => [other.ranks, other.gpu])];
    return [element("p", { class: "note" }, named.map((pair) => pair.join(", ")).join("; "))];
  }

  // The measured time of a launch, and its difference from the prediction.
  function measuredText(launch) {
    const { launches, measured } = View.program;
    const us = measured.times_us[launch];
    if (us === null) return "not found in the record";
    const off = us - (launches.end_us[launch] - launches.start_us[launch]);
    return `${showTime(us)} from ${showTime(measured.starts_us[launch])}, ${showTime(Math.abs(off))} ${off > 0 ? "more" : "less"} than predicted`;
  }

  // A launch of another rank.
  function otherPairs({ launch, other }) {
    const { launches, operations } = other;
    return [
      ["rank", `${other.ranks}, ${other.gpu}`],
      ["launch", `${launch}, on ${launches.stream[launch]}`],
      ["operation", short(operations.name[launches.operation[launch]])],
      ["runs", `${showTime(launches.start_us[launch])} to ${showTime(launches.end_us[launch])}`],
    ];
  }

  function describe({ launch, stall, measured, other }) {
    const { launches } = View.program;
    if (other) return otherPairs({ launch, other }).map((pair) => pair.join(": ")).join("\n");
    if (measured) return `${launchTitle(launch)}\nmeasured: ${measuredText(launch)}`;
    if (stall) return `${launches.stream[launch]} waits ${showTime(launches.stall_us[launch])} before ${launchTitle(launch)}`;
    return `${launchTitle(launch)}\n${showTime(launches.end_us[launch] - launches.start_us[launch])}` +
      `, alone ${showTime(launches.time_us[launch])}${launches.measured[launch] ? "" : " (estimated)"}`;
  }

  function choose({ launch, other }) {
    chosen = other ? -1 : launch;
    if (other) {
      detail.replaceChildren(pairs(otherPairs({ launch, other })));
      chart.draw();
      return;
    }
    const { launches, operations } = View.program;
    const op = launches.operation[launch];
    const waited = View.program.waits.filter(([, later]) => later === launch).map(([earlier]) => earlier);
    detail.replaceChildren(pairs([
      ["launch", `${launch}, on ${launches.stream[launch]}`],
      ["operation", element("button", { class: "link", type: "button", onclick: () => View.on.operation(op) }, operations.name[op])],
      ["kernel", operations.kernels[op]],
      ["runs", `${showTime(launches.start_us[launch])} to ${showTime(launches.end_us[launch])}; alone it takes ` +
        `${showTime(launches.time_us[launch])}${launches.measured[launch] ? "" : " (estimated)"}` +
        (launches.synchronise_us[launch] ? `, with ${showTime(launches.synchronise_us[launch])} more for synchronising with another stream` : "")],
      ...(View.program.measured ? [["measured", measuredText(launch)]] : []),
      ["its stream was idle", `${showTime(launches.stall_us[launch])} before it`],
      ["waits for", ...(waited.length ? launchList(waited) : ["no other stream"])],
    ]));
    chart.draw();
  }

  function waits(self, pen) {
    const { launches } = View.program;
    const row = (i) => lanes.length - lanes.indexOf(launches.stream[i]) - 0.5;
    pen.strokeStyle = colour("ink");
    for (const [earlier, later] of View.program.waits) {
      if (earlier !== chosen && later !== chosen) continue;
      pen.beginPath();
      pen.moveTo(self.px(launches.end_us[earlier]), self.py(row(earlier)));
      pen.lineTo(self.px(launches.start_us[later]), self.py(row(later)));
      pen.stroke();
    }
  }

  function fill() {
    const { launches, operations } = View.program;
    streams = [...new Set(launches.stream)];
    const { measured } = View.program;
    lanes = measured ? streams.flatMap((stream) => [stream, `${stream}, measured`]) : streams;
    const shown = View.name === "train" ? others : [];
    const laneOf = (other, launch) => `${other.launches.stream[launch]}, ${other.ranks}`;
    lanes = [...lanes, ...shown.flatMap((other) => [...new Set(other.launches.stream.map((_, i) => laneOf(other, i)))])];
    chart.options.height = 60 + 42 * lanes.length;
    items = [];
    chosen = -1;
    const rectangles = { x0: [], x1: [], y0: [], y1: [], colours: [] };
    const put = (item, lane, x0, x1, name) => {
      const row = lanes.length - 1 - lanes.indexOf(lane);
      items.push(item);
      rectangles.x0.push(x0);
      rectangles.x1.push(x1);
      rectangles.y0.push(row + 0.12);
      rectangles.y1.push(row + (item.stall ? 0.35 : 0.88));
      rectangles.colours.push(name);
    };
    const sum = { alone: {}, synchronise: {}, slower: {}, idle: {} };
    for (let i = 0; i < launches.count; i++) {
      const stream = launches.stream[i];
      const us = { alone: launches.time_us[i], synchronise: launches.synchronise_us[i], idle: launches.stall_us[i] };
      us.slower = launches.end_us[i] - launches.start_us[i] - us.alone - us.synchronise;
      for (const what of Object.keys(sum)) sum[what][stream] = (sum[what][stream] || 0) + us[what];
      put({ launch: i }, stream, launches.start_us[i], launches.end_us[i], operations.decision[launches.operation[i]]);
      if (launches.stall_us[i] > 0 && stream === "compute")
        put({ launch: i, stall: true }, stream, launches.start_us[i] - launches.stall_us[i], launches.start_us[i], "stall");
    }
    let end = View.program.us;
    for (let i = 0; measured && i < launches.count; i++) {
      if (measured.times_us[i] === null) continue;
      const stop = measured.starts_us[i] + measured.times_us[i];
      put({ launch: i, measured: true }, `${launches.stream[i]}, measured`, measured.starts_us[i], stop,
        operations.decision[launches.operation[i]]);
      end = Math.max(end, stop);
    }
    for (const other of shown) {
      for (let i = 0; i < other.launches.count; i++) {
        put({ launch: i, other }, laneOf(other, i), other.launches.start_us[i], other.launches.end_us[i],
          other.operations.decision[other.launches.operation[i]]);
        end = Math.max(end, other.launches.end_us[i]);
      }
    }
    chart.set({ count: items.length, ...rectangles },
      { ...chart.options.x, high: end }, { ...chart.options.y, high: Math.max(1, lanes.length) });
    keys.replaceChildren(legend([...DECISIONS.map((d) => [d, d]), ["stall", "compute stream waits"]]), ...ranksShown());
    const more = (what, us) => (us > 0.005 ? ` + ${showTime(us)} ${what}` : "");
    sums.textContent = streams.map((s) => `${s}: ${showTime(sum.alone[s])} alone` + more("of synchronising with other streams", sum.synchronise[s]) +
      more("slower beside them", sum.slower[s]) + (s === "compute" ? `, waits ${showTime(sum.idle[s])}` : "")).join("; ");
  }
  View.listeners.push(fill);
  fill();
}
