// Numbers for readers, as text.py writes them, and the search that plots share.
"use strict";
const numbers = (() => {
  const percent = (v) => `${Number((100 * v).toPrecision(4))} %`;
  // as show_size and show_time of planner/units.py
  const UNITS = { B: [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30]],
    ms: [["us", 1e-3], ["ms", 1], ["s", 1e3], ["min", 6e4], ["h", 36e5]] };
  const three = (v) => (Math.abs(v) < 999.5 ? Number(v.toPrecision(3)) : Math.round(v));
  const scaled = (v, units) => {
    if (v === 0) return units === UNITS.ms ? "0 s" : "0 B";
    const at = units.findIndex(([, factor], i) => i + 1 === units.length
      || Math.abs(three(v / factor)) < Math.round(units[i + 1][1] / factor));
    const [name, factor] = units[at];
    const shown = at && Math.abs(v) < factor ? Math.sign(v) : three(v / factor);
    return `${shown.toLocaleString("en", { maximumSignificantDigits: 15 })} ${name}`;
  };
  const plain = (v) => Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3)
    ? String(Number(v.toPrecision(5))).replace("e+", "e")
    : Number(v.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  // a value with its unit: one of those of text.number
  const show = (v, unit) => {
    if (v === null || v === undefined) return "–";
    if (unit === "%") return percent(v);
    if (UNITS[unit]) return scaled(v, UNITS[unit]);
    return unit === "count" ? Math.round(v).toLocaleString("en") : plain(v);
  };
  // index of the value of an ascending list that is nearest to x
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  return { show, nearest };
})();
