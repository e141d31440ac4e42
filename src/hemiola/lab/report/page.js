// Draws the charts of the report. PAGE holds the runs, the tables, the Vega-Lite specifications and the list of charts.
// Switches and the legend act on all charts at once.
const PAGE = JSON.parse(document.getElementById("data").textContent);
const views = new Map();
const state = { scale: PAGE.scale, measure: PAGE.measure, lit: new Set() };
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
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// Tables travel as columns and rows of numbers, runs as their place in the list; see page.py.
function rowsOf(chart) {
  const table = PAGE.tables[chart.table];
  const at = (name) => table.columns.indexOf(name);
  if (chart.spec !== "curves") return table.rows.map((row) => Object.fromEntries(table.columns.map((name, i) => [name, row[i]])));
  const y = chart.y ?? state.measure;
  const [run, x, mean, low, high] = ["run", chart.x, y, y + "_low", y + "_high"].map(at);
  return table.rows
    .filter((row) => row[x] !== null && row[mean] !== null)
    .map((row) => ({ run: PAGE.runs[row[run]], x: row[x], mean: row[mean], low: row[low], high: row[high] }));
}

function specOf(chart, rows) {
  let name = chart.spec;
  if (name === "curves") name += state.scale === "log" && rows.some((row) => row.mean > 0) ? "-log" : "-linear";
  const swapped = { "§x": chart.title ?? "", "§ink": chart.ink ?? "" };
  const lite = JSON.parse(JSON.stringify(PAGE.specs[name]), (_, value) => swapped[value] ?? value);
  return { ...lite, description: chart.label, datasets: { rows } };
}

function describe(chart, datum) {
  const line = (label, value) => [label, value];
  if (chart.spec === "curves") {
    const same = datum.low === datum.high;
    return [
      datum.run,
      line(chart.title, figure(datum.x)),
      line(chart.y ? chart.yTitle : PAGE.measures[state.measure], figure(datum.mean)),
      ...(same ? [] : [line("lowest to highest", `${figure(datum.low)} to ${figure(datum.high)}`)]),
    ];
  }
  if (chart.spec === "ledger") return [`worker ${datum.worker}`, line(datum.fate, figure(datum.units))];
  if (datum.rule) return [datum.rule, line("staleness", figure(datum.at))];
  const more = datum.staleness === PAGE.tail ? " or more" : "";
  return [`staleness ${datum.staleness}${more}`, line("share of reports", `${figure(100 * datum.share)} %`)];
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
  const place = document.getElementById(chart.id);
  views.get(chart.id)?.finalize();
  place.replaceChildren();
  const rows = rowsOf(chart);
  if (chart.spec === "curves" && !chart.y) place.closest("figure").querySelector("b").textContent = PAGE.measures[state.measure];
  const options = { mode: "vega-lite", renderer: "svg", actions: false, defaultStyle: false, tooltip: tooltip(chart) };
  const { view } = await vegaEmbed(place, specOf(chart, rows), options);
  views.set(chart.id, view);
  view.addEventListener("click", (_, item) => item?.datum?.datum?.run !== undefined ? light(item.datum.datum.run) : item?.datum?.run !== undefined && light(item.datum.run));
  if (chart.spec === "curves") await view.signal("highlight", [...state.lit]).runAsync();
}

function drawAll(charts) {
  return Promise.all(
    charts.map((chart) =>
      draw(chart).catch((error) => {
        console.error(error);
        document.getElementById(chart.id).textContent = "This chart could not be drawn.";
      }),
    ),
  );
}

function light(run) {
  state.lit.has(run) ? state.lit.delete(run) : state.lit.add(run);
  const legend = document.querySelector(".legend");
  legend.classList.toggle("chosen", state.lit.size > 0);
  for (const button of legend.children) button.setAttribute("aria-pressed", state.lit.has(PAGE.runs[button.dataset.run]));
  for (const chart of PAGE.charts) if (chart.spec === "curves") views.get(chart.id)?.signal("highlight", [...state.lit]).runAsync();
}

for (const button of document.querySelectorAll(".legend button")) button.addEventListener("click", () => light(PAGE.runs[button.dataset.run]));
for (const button of document.querySelectorAll("[data-set]")) {
  const { set, value } = button.dataset;
  button.setAttribute("aria-pressed", state[set] === value);
  button.addEventListener("click", async () => {
    state[set] = value;
    for (const other of document.querySelectorAll(`[data-set="${set}"]`)) other.setAttribute("aria-pressed", other === button);
    await drawAll(PAGE.charts.filter((chart) => chart.spec === "curves" && (set === "scale" || !chart.y)));
  });
}
await unpack();
await drawAll(PAGE.charts);
document.documentElement.dataset.drawn = PAGE.charts.length;
