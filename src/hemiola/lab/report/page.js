// Draws the charts of the report. PAGE holds the runs, columns of numbers, Vega-Lite specifications, and the charts:
// which columns and which specification each takes, its place in the page, and at which settings of the switches it is
// seen. Switches and the legend act on all charts at once.
const PAGE = JSON.parse(document.getElementById("data").textContent);
const views = new Map();
const state = { ...PAGE.state, lit: new Set() };
const tip = document.getElementById("tip");

async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("vega").textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.type = "module";
  script.textContent = `${await new Response(stream).text()}\ndispatchEvent(new Event("unpacked"));`;
  const ready = new Promise((resolve) => addEventListener("unpacked", resolve, { once: true }));
  document.head.append(script);
  await ready;
  script.remove();
}

function figure(value) {
  if (typeof value !== "number" || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace("+", "");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// Columns of words travel as a list of the words and, row by row, which it is.
function column(place) {
  const found = PAGE.columns[place];
  return found.words ? found.at.map((word) => found.words[word]) : found;
}

function rowsOf(chart) {
  const columns = Object.entries(chart.rows).map(([name, place]) => [name, column(place)]);
  const rows = columns[0][1].map((_, i) => Object.fromEntries(columns.map(([name, values]) => [name, values[i]])));
  return rows.map((row) => Object.fromEntries(Object.entries(row).filter(([, value]) => value !== null)));
}

function specOf(chart) {
  const place = chart.specs[state.scale] ?? Object.values(chart.specs)[0];
  const text = [chart.title, chart.against].filter(Boolean).join(" against ");
  return { ...structuredClone(PAGE.specs[place]), config: PAGE.style, description: text, datasets: { rows: rowsOf(chart) } };
}

const seen = (chart) => Object.entries(chart.when).every(([key, value]) => state[key] === value);

// What the pointer is told: a title and lines, by what a row has.
function describe(chart, row) {
  if (row.what) return [`worker ${row.worker} ${row.what}`, ["for", figure(row.end - row.begin)]];
  if (row.fate) return [row.name, [row.fate, figure(row.units)]];
  if (row.rule) return [row.rule, ["staleness", figure(row.at)]];
  if (row.share !== undefined) return [`staleness ${row.staleness}`, ["share of reports", `${figure(100 * row.share)} %`]];
  if (row.seed !== undefined) return [row.run, [`seed ${row.seed}`, figure(row.value)]];
  if (row.text !== undefined) return [row.run, [chart.title, row.text]];
  const band = row.low === row.high ? [] : [["lowest to highest", `${figure(row.low)} to ${figure(row.high)}`]];
  return [row.run, [chart.against, figure(row.x)], [chart.title, figure(row.mean)], ...band];
}

function tooltip(chart) {
  return (_, event, item, value) => {
    if (!value || !event.clientX) return void (tip.hidden = true);
    const [title, ...lines] = describe(chart, value);
    tip.replaceChildren(document.createElement("b"), ...lines.map(() => document.createElement("div")));
    tip.firstChild.textContent = title;
    lines.forEach(([label, text], i) => (tip.children[i + 1].textContent = `${label}: ${text}`));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 14}px`;
  };
}

async function draw(chart) {
  const place = document.getElementById(chart.place);
  const [title, against] = ["b", "span"].map((part) => place.closest("figure").querySelector(`figcaption > ${part}`));
  if (title) title.textContent = chart.title;
  if (against) against.textContent = `against ${chart.against}`;
  views.get(chart.place)?.finalize();
  place.replaceChildren();
  const options = { mode: "vega-lite", renderer: "svg", actions: false, defaultStyle: false, tooltip: tooltip(chart) };
  const { view } = await vegaEmbed(place, specOf(chart), options);
  views.set(chart.place, view);
  view.addEventListener("click", (_, item) => {
    const run = item?.datum?.datum?.run ?? item?.datum?.run;
    if (run !== undefined) light(run);
  });
  await highlight(view);
}

async function highlight(view) {
  try {
    await view.signal("highlight", [...state.lit]).runAsync();
  } catch {
    // Charts of single runs have nothing to highlight.
  }
}

function drawAll(charts) {
  return Promise.all(
    charts.filter(seen).map((chart) =>
      draw(chart).catch((error) => {
        console.error(error);
        document.getElementById(chart.place).textContent = "This chart could not be drawn.";
      }),
    ),
  );
}

function light(run) {
  state.lit.has(run) ? state.lit.delete(run) : state.lit.add(run);
  const legend = document.querySelector(".legend");
  legend?.classList.toggle("chosen", state.lit.size > 0);
  for (const button of legend?.children ?? []) button.setAttribute("aria-pressed", state.lit.has(PAGE.runs[button.dataset.run]));
  for (const view of views.values()) highlight(view);
}

for (const button of document.querySelectorAll(".legend button")) button.addEventListener("click", () => light(PAGE.runs[button.dataset.run]));
for (const button of document.querySelectorAll("[data-set]")) {
  const { set, value } = button.dataset;
  button.setAttribute("aria-pressed", state[set] === value);
  button.addEventListener("click", async () => {
    state[set] = value;
    for (const other of document.querySelectorAll(`[data-set="${set}"]`)) other.setAttribute("aria-pressed", other === button);
    await drawAll(PAGE.charts.filter((chart) => (set === "scale" ? Object.keys(chart.specs).length > 1 : set in chart.when)));
  });
}
await unpack();
await drawAll(PAGE.charts);
document.documentElement.dataset.drawn = PAGE.charts.filter(seen).length;
