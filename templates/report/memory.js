// The arena: address over time, each rectangle the bytes of one buffer; above it the live bytes by kind.
function memorySection(place) {
  let by = "kind";
  const axes = PLAN.samples_per_s ? [["time_us", "predicted time"], ["launch", "launches"]] : [["launch", "launches"]];
  let over = axes[0][0];
  const curve = element("div");
  const title = element("h3");
  const shade = select("colour by", [["kind", "kind"], ["decision", "decision"]], (value) => { by = value; fill(); });
  const keys = element("div");
  const map = element("div");
  const detail = element("div", { class: "panel detail", "aria-live": "polite" }, "Choose a rectangle to see its value, and why it is there.");
  place.append(
    element("div", { class: "controls" },
      shade,
      select("across", axes, (value) => { over = value; fill(); }),
      element("button", { type: "button", onclick: () => largestAtPeak() }, "largest value at the peak"),
    ),
    keys, title, curve, element("h3", {}, "Map of the arena"), element("div", { class: "beside" }, map, detail));

  const at = (i) => (over === "launch" ? i : View.program.clock[i]);
  const chart = new Chart(map, {
    label: "map of the arena: address over time",
    height: 420,
    x: { low: 0, high: 1, show: showTime },
    y: { low: 0, high: 1, show: showSize },
    gap: true,
    describe: (i) => {
      const p = View.program.pieces;
      return `${short(p.value[i]) || "workspace"}\n${p.kind[i]}, ${showSize(p.size_bytes[i])} at ${showSize(p.offset[i])}\n` +
        `launches ${p.start[i]} to ${p.stop[i] - 1}, ${p.decision[i]}`;
    },
    choose: (i) => detail.replaceChildren(pieceDetail(i)),
    over: (self, pen) => {
      const peak = self.px(at(View.program.peak.launch));
      pen.strokeStyle = colour("ink");
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(peak, 0);
      pen.lineTo(peak, 1000);
      const left = self.py(LEFT_BYTES);
      pen.moveTo(self.plot.left, left);
      pen.lineTo(self.plot.left + self.plot.width, left);
      pen.stroke();
      pen.setLineDash([]);
    },
  });
  chart.options.y.ticks = () => byteTicks(chart.view.y0, chart.view.y1, 8);

  function fill() {
    const p = View.program.pieces;
    const name = by === "kind" ? (i) => KIND_COLOUR[p.kind[i]] : (i) => p.decision[i];
    const items = { count: p.count, x0: [], x1: [], y0: p.offset, y1: [], colours: [] };
    for (let i = 0; i < p.count; i++) {
      items.x0.push(at(p.start[i]));
      items.x1.push(at(p.stop[i]));
      items.y1.push(p.offset[i] + p.size_bytes[i]);
      items.colours.push(name(i));
    }
    const arena = DATA.predictions.arena_bytes;
    const top = LEFT_BYTES < 1.5 * arena ? Math.max(LEFT_BYTES, arena) : arena;
    chart.set(items,
      { low: 0, high: at(View.program.launches.count), show: over === "launch" ? (x) => x.toFixed(0) : showTime,
        title: over === "launch" ? "launches" : "predicted time" },
      { ...chart.options.y, low: 0, high: top * 1.02 });
    const groups = by === "kind" ? { by, names: DATA.kinds, colour: KIND_COLOUR }
      : { by, names: DECISIONS, colour: Object.fromEntries(DECISIONS.map((decision) => [decision, decision])) };
    const memory = memoryBy(View.program, by);
    keys.replaceChildren(legend(groups.names.filter((name) => memory[name]).map((name) => [groups.colour[name], name])));
    title.textContent = `Live bytes by ${by}`;
    curve.replaceChildren(
      memoryCurve({ ...View.program, memory }, at, top, Math.max(300, Math.min(1200, place.clientWidth)), groups));
  }

  function colourBy(choice) {
    shade.querySelector("select").value = by = choice;
    fill();
  }

  function largestAtPeak() {
    const p = View.program.pieces;
    const { launch } = View.program.peak;
    let best = -1;
    for (let i = 0; i < p.count; i++) {
      if (p.start[i] <= launch && launch < p.stop[i] && (best < 0 || p.size_bytes[i] > p.size_bytes[best])) best = i;
    }
    View.on.piece(best);
  }

  View.on.piece = (i) => {
    chart.show(i);
    if (i >= 0) detail.replaceChildren(pieceDetail(i));
  };
  // The rectangle of a value that a sentence names: in the training step, at the peak if it has one there, else its
  // largest.
  View.on.value = (name, choice) => {
    if (View.name !== "train") chooseProgram("train");
    colourBy(choice);
    const p = View.program.pieces;
    const { launch } = View.program.peak;
    const weight = (i) => (p.start[i] <= launch && launch < p.stop[i] ? 2 : 1) * 2 ** 50 + p.size_bytes[i];
    let best = -1;
    for (let i = 0; i < p.count; i++) if (p.value[i] === name && (best < 0 || weight(i) > weight(best))) best = i;
    View.on.piece(best);
  };
  // A link that names no value selects the first value of its answer.
  for (const link of document.querySelectorAll("#answers [data-colour]")) {
    const value = link.dataset.value || link.closest("details").querySelector("[data-value]")?.dataset.value;
    link.addEventListener("click", () => (value ? View.on.value(value, link.dataset.colour) : colourBy(link.dataset.colour)));
  }
  View.listeners.push(() => { fill(); detail.replaceChildren("Choose a rectangle."); });
  let width = place.clientWidth;
  redraws.push(() => {
    if (place.clientWidth !== width) { width = place.clientWidth; fill(); }
  });
  fill();
}

function pieceDetail(i) {
  const p = View.program.pieces;
  const peak = View.program.peak.launch;
  const lives = p.start[i] <= peak && peak < p.stop[i];
  const rows = [
    ["value", p.value[i] || "workspace of one launch"],
    ["kind", p.kind[i]],
    ["bytes", `${showSize(p.size_bytes[i])} (${p.size_bytes[i].toLocaleString("en")} B) at address ${p.offset[i].toLocaleString("en")}`],
    ["live", `launches ${p.start[i]} to ${p.stop[i] - 1}${lives ? ", the peak among them" : ", not at the peak"}`],
    ["written by", ...launchList(p.writers[i])],
    ["read by", ...launchList(p.readers[i])],
    ["why", whyDecision(p.value[i], p.decision[i]).join(" ")],
  ];
  if (p.gap_start[i] !== null) {
    const inside = p.gap_start[i] <= peak && peak < p.gap_stop[i];
    const lacks = p.lacks[i].length ? `, and what it is computed from first: ${p.lacks[i].slice(0, 4).map(short).join(", ")}` : "";
    rows.push(["letting it go",
      `would free ${showSize(p.size_bytes[i])} in launches ${p.gap_start[i]} to ${p.gap_stop[i] - 1}, ` +
      `${inside ? "the peak among them" : "not at the peak"}. It would cost ${showTime(p.recompute_us[i])} of recomputing${lacks}` +
      (p.offload_us[i] === null ? "." : `, or ${showTime(p.offload_us[i])} of copies to the host and back, ` +
        `with which at least two kernels synchronise, at ${showTime(PLAN.copy_wait_us)} each.`)]);
  } else if (p.kind[i] !== "workspace") {
    const { recomputed, offloaded } = View.program.techniques;
    const gone = [...recomputed.filter((r) => r.outputs.includes(p.value[i])), ...offloaded.filter((o) => o.value === p.value[i])];
    rows.push(["letting it go", gone.length ? `already let go in ${gone.map((one) => `launches ${one.absent[0]} to ${one.absent[1] - 1}`).join(", ")}`
      : "there is no pause between its uses, or it lasts from step to step"]);
  }
  return pairs(rows);
}
