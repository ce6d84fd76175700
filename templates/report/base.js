// Common parts of all scripts: the data of the page, its tables, formats of sizes and times, and elements. Texts are
// set by textContent only. All scripts of a page form one module, one after another: later ones wait for the data.

// A text that was deflated (zlib, RFC 1950) and encoded in base64.
async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}

// Columns of a table, with texts in place of their indices.
function columnsOf(table) {
  const columns = { count: table.count };
  for (const [name, column] of Object.entries(table.columns)) {
    columns[name] = table.texts.includes(name) ? column.map((i) => DATA.texts[i])
      : table.lists.includes(name) ? column.map((list) => list.map((i) => DATA.texts[i])) : column;
  }
  return columns;
}

// Rows of a table as objects.
function rowsOf(table) {
  const columns = Object.entries(columnsOf(table)).filter(([, column]) => Array.isArray(column));
  return Array.from({ length: table.count }, (_, i) => Object.fromEntries(columns.map(([name, column]) => [name, column[i]])));
}

// Rounds as Python does: half to even, where toFixed rounds up. A number with so few binary places has an exact half.
function rounded(value, digits) {
  const scaled = value * 10 ** digits;
  const half = Number.isInteger(value * 2 ** (digits + 1)) && Math.abs(scaled % 1) === 0.5;
  return (half ? (2 * Math.round(scaled / 2)) / 10 ** digits : value).toFixed(digits);
}

// The formats of mbc/units.py.
function showSize(bytes) {
  if (bytes === null || bytes === undefined) return "-";
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024 || unit === "GiB") {
      return unit === "B" ? `${size.toFixed(0)} B` : `${rounded(size, Math.abs(size) < 10 ? 2 : 1)} ${unit}`;
    }
    size /= 1024;
  }
}

function showTime(us) {
  if (us === null || us === undefined) return "-";
  if (us < 0) return "-" + showTime(-us);
  for (const [limit, unit, scale] of [[1e3, "us", 1], [1e6, "ms", 1e3], [Infinity, "s", 1e6]]) {
    if (us < limit) {
      const value = us / scale;
      return `${rounded(value, value < 10 ? 2 : 1)} ${unit}`;
    }
  }
}

function showRate(perSecond) {
  return perSecond > 0 && perSecond < 100 ? perSecond.toPrecision(3) : Number(rounded(perSecond, 0)).toLocaleString("en");
}

function showCount(value) {
  if (value === null || value === undefined) return "-";
  for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= scale) return `${(value / scale).toFixed(value < 10 * scale ? 2 : 1)} ${unit}`;
  }
  return `${value}`;
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

const byId = (id) => document.getElementById(id);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function select(label, choices, onchange) {
  const box = element("select", { "aria-label": label, onchange: () => onchange(box.value) });
  for (const [value, text] of choices) box.append(element("option", { value }, text));
  return element("label", {}, `${label} `, box);
}

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, text]) => {
    const mark = element("i");
    mark.style.background = `var(--${name})`;
    return element("span", {}, mark, text);
  }));
}

function pairs(rows) {
  const list = element("dl");
  for (const [term, ...what] of rows) list.append(element("dt", {}, term), element("dd", {}, ...what));
  return list;
}

// Light or dark as the system is, until the button is used.
const redraws = [];
function redrawAll() {
  for (const redraw of redraws) redraw();
}

function setDark(dark) {
  document.documentElement.classList.toggle("dark", dark);
  redrawAll();
}

(function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  setDark(system.matches);
  system.addEventListener("change", () => setDark(system.matches));
  byId("theme").addEventListener("click", () => setDark(!document.documentElement.classList.contains("dark")));
  let before = false;
  addEventListener("beforeprint", () => {
    before = document.documentElement.classList.contains("dark");
    setDark(false);
  });
  addEventListener("afterprint", () => setDark(before));
  addEventListener("resize", redrawAll);
})();

const DATA = JSON.parse(await unpacked(byId("data").textContent));
