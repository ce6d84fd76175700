// One program of the plan in the form that the other scripts use, and texts about launches, operations and values.
const PLAN = DATA.plan;
const LEFT_BYTES = PLAN.budget_bytes - DATA.predictions.overhead_bytes; // bytes of the arena
const COPY_STREAMS = ["to_host", "to_device", "to_peer", "from_peer"]; // what runs there overlaps kernels
const isCopy = (o, i) => COPY_STREAMS.includes(o.stream[i]);
const DECISIONS = ["kept", "recomputed", "offloaded", "depth-first", "divided"];

function programOf(name) {
  const data = DATA.programs[name];
  const program = {
    ...data,
    operations: columnsOf(data.operations),
    launches: columnsOf(data.launches),
    pieces: columnsOf(data.pieces),
  };
  program.techniques = Object.fromEntries(Object.entries(data.techniques).map(([what, table]) => [what, rowsOf(table)]));
  program.count = program.launches.count;
  program.total = new Array(Math.max(1, program.count)).fill(0);
  for (const taken of Object.values(memoryBy(program, "kind"))) taken.forEach((bytes, i) => (program.total[i] += bytes));
  program.left = LEFT_BYTES;
  const { time_us, limit_us } = program.operations;
  program.operations.lost_us = time_us.map((us, i) => (limit_us[i] === null ? null : us - limit_us[i]));
  // Only the training step is measured. An operation has a measured time if all its launches have one.
  program.measured = name === "train" ? DATA.measured : null;
  if (program.measured) {
    const sums = (of) => {
      const totals = new Array(program.operations.count).fill(0);
      for (let i = 0; i < program.launches.count; i++) totals[program.launches.operation[i]] += of(i);
      return totals;
    };
    const times = sums((i) => program.measured.times_us[i] ?? NaN).map((us) => (Number.isNaN(us) ? null : us));
    const predicted = sums((i) => program.launches.end_us[i] - program.launches.start_us[i]);
    program.operations.measured_us = times;
    program.operations.off_us = times.map((us, i) => (us === null ? null : us - predicted[i]));
  } else {
    program.operations.measured_us = program.operations.off_us = new Array(program.operations.count).fill(null);
  }
  // Launches of other streams start when they can: time at launch i is that of the next launch of the compute stream.
  program.clock = new Array(program.launches.count + 1);
  program.clock[program.launches.count] = program.launches.end_us.reduce((most, us) => Math.max(most, us), 0);
  for (let i = program.launches.count - 1; i >= 0; i--) {
    program.clock[i] = program.launches.stream[i] === "compute" ? program.launches.start_us[i] : program.clock[i + 1];
  }
  program.us = program.launches.end_us.reduce((most, at) => Math.max(most, at), 0);
  return program;
}

// Live bytes over the launches, grouped by a column of the rectangles.
function memoryBy({ pieces: p, count }, column) {
  const live = {};
  for (let i = 0; i < p.count; i++) {
    const group = p[column][i];
    const change = live[group] || (live[group] = new Array(Math.max(1, count) + 1).fill(0));
    change[p.start[i]] += p.size_bytes[i];
    change[p.stop[i]] -= p.size_bytes[i];
  }
  for (const taken of Object.values(live)) {
    for (let i = 1; i < taken.length; i++) taken[i] += taken[i - 1];
    taken.pop(); // after the last launch
  }
  return live;
}

const View = { program: programOf("train"), name: "train", listeners: [], on: {} };

function choosePart(name) {
  View.name = name;
  View.program = programOf(name);
  for (const listener of View.listeners) listener();
}

const launchTitle = (i) => {
  const { launches, operations } = View.program;
  return i >= launches.count ? `launch ${i}` : `launch ${i} (${short(operations.name[launches.operation[i]])})`;
};

const short = (name) => (name.length > 90 ? `${name.slice(0, 44)} … ${name.slice(-44)}` : name);

function launchLink(i) {
  return element("button", { class: "link", type: "button", onclick: () => View.on.operation(View.program.launches.operation[i]) },
    launchTitle(i));
}

function launchList(launches) {
  if (!launches.length) return ["no launch of this program"];
  const shown = launches.slice(0, 6).flatMap((i, n) => (n ? [", ", launchLink(i)] : [launchLink(i)]));
  return launches.length > 6 ? [...shown, ` and ${launches.length - 6} more`] : shown;
}

// The largest number of live bytes in [start, stop).
function mostLive(start, stop) {
  let [most, at] = [0, start];
  for (let i = start; i < stop; i++) if (View.program.total[i] > most) [most, at] = [View.program.total[i], i];
  return { most, at };
}

// Why a value is kept, recomputed or offloaded, in sentences.
function whyDecision(value, decision) {
  const techniques = View.program.techniques;
  const sentences = [];
  for (const one of techniques.recomputed.filter((r) => r.outputs.includes(value))) {
    const { most, at } = mostLive(...one.absent);
    const over = most + one.saved_bytes - LEFT_BYTES;
    sentences.push(`Recomputed by launch ${one.launches.join(", ")}, in ${showTime(one.time_us)}: ` +
      `${showSize(one.saved_bytes)} are freed in launches ${one.absent[0]} to ${one.absent[1] - 1}. In these launches at most ` +
      `${showSize(most)} are live (launch ${at}), of the ${showSize(LEFT_BYTES)} that the budget leaves. ` +
      (over > 0 ? `If the value were kept, they would exceed the budget by ${showSize(over)}.` : "If the value were kept, they would still fit."));
  }
  for (const one of techniques.offloaded.filter((o) => o.value === value)) {
    const { most, at } = mostLive(...one.absent);
    sentences.push(`Offloaded to the ${one.space} by launches ${one.launches.join(", ")}: ${showSize(one.saved_bytes)} are freed ` +
      `in launches ${one.absent[0]} to ${one.absent[1] - 1}, in which at most ${showSize(most)} are live (launch ${at}) of ` +
      `${showSize(LEFT_BYTES)}. The copies take ${showTime(one.time_us)} and cost the kernels about ${showTime(one.cost_us)}.`);
  }
  for (const one of techniques.depth_first.filter((d) => d.value === value)) {
    sentences.push(`Its operations run depth-first, ${one.rows} rows at a time: ${showSize(one.saved_bytes)} are never live.`);
  }
  if (!sentences.length) sentences.push(decision === "kept" ? "Kept in the arena from its first write to its last read." : decision);
  return sentences;
}
