const KIND_COLOUR = Object.fromEntries(DATA.kinds.map((kind, i) => [kind, `c${i}`]));

// Areas by group (by kinds unless `groups` says otherwise): names in the order in which they are stacked, and the
// colour of each. Among the launches in one pixel the one with most live bytes is drawn, so that no peak is lost.
// `program` has `count` launches, `memory` by group, its `total`, `peak`, and `left`: the bytes that the budget leaves.
// Labels are above the areas, in lines of their own.
function memoryCurve(program, at, top, width = 960, groups = { by: "kind", names: DATA.kinds, colour: KIND_COLOUR }) {
  const within = program.left <= top * 1.02; // the budget is in sight
  const [height, left, bottom, above] = [220 + (within ? 28 : 14), 64, 18, within ? 34 : 20];
  const { count } = program;
  const end = at(count) || 1;
  const x = (i) => left + (at(i) / end) * (width - left - 8);
  const y = (bytes) => above + (1 - bytes / (top * 1.02)) * (height - above - bottom);
  const picks = [];
  for (let i = 0; i < count;) {
    const pixel = Math.floor(x(i));
    let best = i;
    let next = i;
    for (; next < count && Math.floor(x(next)) === pixel; next++) if (program.total[next] > program.total[best]) best = next;
    picks.push([best, x(i), x(next)]);
    i = next;
  }
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `live bytes by ${groups.by} over the launches` });
  for (const tick of byteTicks(0, top * 1.02, 4)) {
    picture.append(svg("line", { x1: left, x2: width - 8, y1: y(tick), y2: y(tick), stroke: "var(--line)" }),
      svg("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, showSize(tick)));
  }
  const base = new Array(picks.length).fill(0);
  for (const group of groups.names) {
    const taken = program.memory[group];
    if (!taken) continue;
    let path = "";
    picks.forEach(([i, from, to], n) => {
      path += `${n ? "L" : "M"}${from.toFixed(1)} ${y(base[n] + taken[i]).toFixed(1)}H${to.toFixed(1)}`;
    });
    for (let n = picks.length - 1; n >= 0; n--) {
      path += `L${picks[n][2].toFixed(1)} ${y(base[n]).toFixed(1)}H${picks[n][1].toFixed(1)}`;
      base[n] += taken[picks[n][0]];
    }
    picture.append(svg("path", { d: `${path}Z`, fill: `var(--${groups.colour[group]})` },
      svg("title", {}, `${group}: ${showSize(taken.reduce((a, b) => Math.max(a, b), 0))} at most`)));
  }
  const { launch, bytes } = program.peak;
  const label = (text, px, py, anchor) => svg("text", { x: px, y: py, "text-anchor": anchor, class: "label" }, text);
  if (within) {
    picture.append(svg("line", { x1: left, x2: width - 8, y1: y(program.left), y2: y(program.left), stroke: "var(--bad)", "stroke-dasharray": "5 3" }),
      label(`the budget leaves ${showSize(program.left)}`, width - 12, 12, "end"));
  }
  const px = x(launch);
  const right = px > width * 0.6;
  picture.append(svg("line", { x1: px, x2: px, y1: above - 14, y2: height - bottom, stroke: "var(--ink)", "stroke-dasharray": "3 3" }),
    label(`peak ${showSize(bytes)}, launch ${launch}`, px + (right ? -6 : 6), above - 6, right ? "end" : "start"));
  return picture;
}
