// Places for the boxes of a graph: ranks by the longest path from an input, in the direction of reading.

const GAP = { across: 60, beside: 22 }; // between ranks; between boxes of a rank
const MARGIN = 8;

/**
 * Place boxes and the points through which edges pass.
 *
 * boxes: {id, width, height}; edges: {source, target, back}; isVertical: ranks go down instead of to the right.
 * Adds x and y to each box, and points to each edge; returns the size of the whole.
 */
export function place(boxes, edges, isVertical) {
  const byName = new Map(boxes.map((box) => [box.id, box]));
  rank(boxes, edges, byName);
  const ranks = [];
  const put = (cell) => (ranks[cell.rank] ??= []).push(cell);
  boxes.forEach(put);
  for (const edge of edges) {
    const [source, target] = [byName.get(edge.source), byName.get(edge.target)];
    edge.cells = [source];
    if (!edge.back) {
      for (let between = source.rank + 1; between < target.rank; between++) {
        const pass = { rank: between, width: 12, height: 12, isPass: true };
        put(pass);
        edge.cells.push(pass);
      }
    }
    edge.cells.push(target);
  }
  order(ranks, edges);
  return positions(ranks, edges, isVertical);
}

function rank(boxes, edges, byName) {
  boxes.forEach((box) => (box.rank = 0));
  const forward = edges.filter((edge) => !edge.back);
  for (let round = 0; round < boxes.length; round++) {
    for (const { source, target } of forward) {
      byName.get(target).rank = Math.max(byName.get(target).rank, byName.get(source).rank + 1);
    }
  }
}

function order(ranks, edges) {
  for (const [index, cells] of ranks.entries()) {
    if (index === 0) continue;
    const before = ranks[index - 1];
    const mean = (cell) => {
      const near = edges.flatMap(({ cells: way }) => (way[way.indexOf(cell) - 1] && way.includes(cell) ? [before.indexOf(way[way.indexOf(cell) - 1])] : []));
      return near.length ? near.reduce((sum, one) => sum + one, 0) / near.length : cells.indexOf(cell);
    };
    const wanted = new Map(cells.map((cell) => [cell, mean(cell) + (cell.isPass || cell.isEnd ? 0.5 : 0)]));
    cells.sort((one, other) => wanted.get(one) - wanted.get(other));
  }
}

function positions(ranks, edges, isVertical) {
  const [along, beside] = isVertical ? ["height", "width"] : ["width", "height"];
  const [main, cross] = isVertical ? ["y", "x"] : ["x", "y"];
  const sizes = ranks.map((cells) => cells.reduce((sum, cell) => sum + cell[beside] + GAP.beside, -GAP.beside));
  const widest = Math.max(...sizes);
  const hasBack = edges.some((edge) => edge.back);
  const turn = hasBack ? 26 : 0; // room for loops to leave the last rank, and to come back to the first
  let at = MARGIN + turn;
  for (const [index, cells] of ranks.entries()) {
    const deep = Math.max(...cells.map((cell) => cell[along]));
    let from = MARGIN + (widest - sizes[index]) / 2;
    for (const cell of cells) {
      if (cell.isPass) cell[along] = deep; // straight past the boxes
      cell[main] = at + (deep - cell[along]) / 2;
      cell[cross] = from;
      from += cell[beside] + GAP.beside;
    }
    at += deep + (isVertical ? 0.62 * GAP.across : GAP.across);
  }
  const size = { [along]: at - (isVertical ? 0.62 * GAP.across : GAP.across) + MARGIN + turn, [beside]: widest + 2 * MARGIN + (hasBack ? 40 : 0) };
  edges.forEach((edge) => (edge.path = path(edge, edges, isVertical, widest)));
  return size;
}

/** Ends of edges are spread over the sides of their boxes. */
function path(edge, edges, isVertical, widest) {
  const leaving = edges.filter((other) => other.cells[0] === edge.cells[0]);
  const coming = edges.filter((other) => other.cells.at(-1) === edge.cells.at(-1));
  const share = (list) => (list.indexOf(edge) + 1) / (list.length + 1);
  const end = (cell, part, isOut) =>
    isVertical
      ? [cell.x + cell.width * part, cell.y + (isOut ? cell.height : 0)]
      : [cell.x + (isOut ? cell.width : 0), cell.y + cell.height * part];
  const points = edge.cells.flatMap((cell, index) => {
    if (index === 0) return [end(cell, share(leaving), true)];
    if (cell === edge.cells.at(-1)) return [end(cell, share(coming), false)];
    return [end(cell, 0.5, false), end(cell, 0.5, true)];
  });
  if (edge.back) return around(points, isVertical, widest);
  let text = `M${points[0]}`;
  for (let index = 1; index < points.length; index++) {
    const [[x, y], [to, low]] = [points[index - 1], points[index]];
    if (index % 2 === 0) {
      text += ` L${to},${low}`;
      continue;
    }
    text += isVertical ? ` C${x},${(y + low) / 2} ${to},${(y + low) / 2} ${to},${low}` : ` C${(x + to) / 2},${y} ${(x + to) / 2},${low} ${to},${low}`;
  }
  return text;
}

function around([[x, y], [to, low]], isVertical, widest) {
  const side = MARGIN + widest + 24;
  if (isVertical) return `M${x},${y} C${x},${y + 30} ${side},${y + 30} ${side},${(y + low) / 2} S${to},${low - 30} ${to},${low}`;
  return `M${x},${y} C${x + 30},${y} ${x + 30},${side} ${(x + to) / 2},${side} S${to - 30},${low} ${to},${low}`;
}
