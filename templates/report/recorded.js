// Results of `mbc fit`, measured steps and curves of a training, if the page has them.
function recordedSection(place) {
  for (const one of DATA.recorded || []) {
    if (one.what === "batches" && !one.fastest.images_per_s) {
      place.append(element("p", {}, `Largest batch within ${showSize(one.largest.budget_bytes)}: ${one.largest.batch}. A plan in fp64 has no predicted times.`));
    } else if (one.what === "batches") {
      place.append(element("h3", {}, "Images per second over the batch"), element("p", {},
        `Largest batch within ${showSize(one.largest.budget_bytes)}: ${one.largest.batch}, ${showRate(one.largest.images_per_s)} images/s; ` +
        `fastest: ${one.fastest.batch}, ${showRate(one.fastest.images_per_s)} images/s.`),
        points(one.probes.filter((p) => p.fits).map((p) => [p.batch, p.images_per_s, `batch ${p.batch}: ${showRate(p.images_per_s)} images/s`]),
          "batch", "images/s", (x) => x.toFixed(0), showRate, true));
    } else if (one.what === "budgets") {
      place.append(element("h3", {}, "Time of a step over the budget"), element("p", {},
        `Without a limit: ${showTime(one.unlimited.train_us)} in ${showSize(one.unlimited.needed_bytes)}.`),
        points(one.probes.filter((p) => p.fits).map((p) => [p.budget_bytes, p.train_us, `${showSize(p.budget_bytes)}: ${showTime(p.train_us)}`]),
          "budget", "step", showSize, showTime, false));
    } else if (one.what === "bench") {
      place.append(element("h3", {}, "Predicted beside measured"), bars([
        ...(one.predicted_ms ? [["predicted", one.predicted_ms * 1e3]] : []), ["measured", one.mbc.step_ms * 1e3],
        ...one.contenders.filter((c) => !c.problem).map((c) => [c.name || `${c.peer} ${c.variant}`, c.step_ms * 1e3]),
      ]), element("p", { class: "note" }, one.predicted_ms
        ? `Measured is ${(100 * (one.mbc.step_ms / one.predicted_ms - 1)).toFixed(1)} % off the prediction.` : "A plan in fp64 has no predicted time."));
    } else if (one.what === "training") trainingCurves(place, one);
  }
}

// A chart for each figure of a training over its steps: for intervals if they have the figure, else for epochs.
function trainingCurves(place, { lines, left_out }) {
  const names = [...new Set(lines.flatMap((line) => Object.keys(line)))].filter((name) =>
    !["kind", "step", "epoch", "seconds", "bad_steps", "waited_s"].includes(name));
  const first = ["loss", "images_per_s"];
  place.append(element("p", {}, `Training: ${Math.max(...lines.map((line) => line.step)).toLocaleString("en")} steps.` +
    (PLAN.samples_per_s ? ` The plan predicts ${showRate(PLAN.samples_per_s)} images/s on ${DATA.others.length || PLAN.ranks ? "the GPUs" : "the GPU"} that it is for.` : "") +
    (left_out ? ` ${left_out.toLocaleString("en")} lines of the log are left out, evenly.` : "")));
  for (const name of [...first, ...names.filter((other) => !first.includes(other))]) {
    const having = lines.filter((line) => typeof line[name] === "number");
    const kind = having.some((line) => line.kind === "interval") ? "interval" : "epoch";
    const shown = having.filter((line) => line.kind === kind);
    if (!shown.length) continue;
    const title = name === "images_per_s" ? "images/s" : name.replaceAll("_", " ");
    const number = (value) => (value && Math.abs(value) < 0.01 ? value.toExponential(1) : Number(value.toPrecision(4)).toLocaleString("en"));
    place.append(element("h3", {}, `${title}, of each ${kind}`), points(
      shown.map((line) => [line.step, line[name], `step ${line.step}, epoch ${line.epoch}: ${number(line[name])}`]),
      "step", title, (x) => x.toFixed(0), number, name === "images_per_s"));
  }
}

function bars(rows) {
  const top = rows.reduce((most, [, us]) => Math.max(most, us), 0) || 1;
  const picture = svg("svg", { viewBox: `0 0 700 ${rows.length * 26}`, role: "img", "aria-label": "times as bars" });
  rows.forEach(([name, us], i) => picture.append(
    svg("text", { x: 200, y: i * 26 + 17, "text-anchor": "end" }, name),
    svg("rect", { x: 208, y: i * 26 + 4, width: (us / top) * 400, height: 18, fill: `var(--c${i ? 0 : 1})` }),
    svg("text", { x: 214 + (us / top) * 400, y: i * 26 + 17 }, showTime(us))));
  return picture;
}

// A line through points, from 0 or from the least value.
function points(list, xTitle, yTitle, showX, showY, fromZero) {
  const [width, height, left, bottom] = [960, 240, 80, 34];
  const xs = list.map(([x]) => x);
  const ys = list.map(([, y]) => y);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const pad = 0.02 * (most(ys) - least(ys) || Math.abs(most(ys)) || 1);
  const [x0, x1, y0, y1] = [least(xs), most(xs), fromZero ? 0 : least(ys) - pad, most(ys) + pad];
  const x = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - 12);
  const y = (v) => 6 + (1 - (v - y0) / (y1 - y0 || 1)) * (height - 6 - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yTitle} over ${xTitle}` });
  for (const tick of ticks(y0, y1, 5)) picture.append(svg("line", { x1: left, x2: width - 12, y1: y(tick), y2: y(tick), stroke: "var(--line)" }),
    svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, showY(tick)));
  for (const tick of ticks(x0, x1, 7)) picture.append(svg("text", { x: x(tick), y: height - bottom + 14, "text-anchor": "middle" }, showX(tick)));
  picture.append(svg("text", { x: width - 12, y: height - 3, "text-anchor": "end" }, `${xTitle} →; ${yTitle} ↑`),
    svg("path", { d: list.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join(""), fill: "none", stroke: "var(--c0)", "stroke-width": 2 }));
  if (list.length <= 200) for (const [a, b, text] of list) picture.append(svg("circle", { cx: x(a), cy: y(b), r: 4, fill: "var(--c0)" }, svg("title", {}, text)));
  return picture;
}
