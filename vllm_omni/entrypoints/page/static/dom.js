// Elements, and how numbers are written.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element; attributes with a function are listeners, null ones are left out. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 60 ? `${value.toFixed(value < 9.95 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const gib = value / 2 ** 30;
  return gib >= 0.995 ? `${gib.toFixed(gib < 9.95 ? 2 : 1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  return value >= 99.5 || value === 0 ? String(Math.round(value)) : value.toFixed(value < 9.95 ? 2 : 1);
}

export function words(name) {
  const text = name.replace(/_s$/, " (s)").replaceAll("_", " ");
  return text[0].toUpperCase() + text.slice(1);
}

/** A file of the user as a data: URL. */
export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(blob);
  });
}
