// Texts with less contrast than AA of WCAG 2.2 asks for: 4.5 to 1, and 3 to 1 for large ones.
// Backgrounds are laid over each other up to that of the page.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = document.documentElement.classList.contains("dark") ? [0, 0, 0, 1] : [255, 255, 255, 1];
  const seen = new Map();
  const ground = (element) => { // what lies behind its texts, and how much of them shows
    if (!element) return [page, 1];
    if (!seen.has(element)) {
      const [behind, opacity] = ground(element.parentElement), style = getComputedStyle(element);
      seen.set(element, [over(rgba(style.backgroundColor), behind), opacity * Number(style.opacity)]);
    }
    return seen.get(element);
  };
  const told = new Set(), done = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (done.has(one) || !walk.currentNode.textContent.trim()) continue;
    done.add(one);
    if (["SCRIPT", "STYLE", "NOSCRIPT", "TITLE"].includes(one.tagName)) continue;
    if (!one.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) || one.closest("svg")) continue;
    const [behind, opacity] = ground(one);
    const style = getComputedStyle(one);
    const color = rgba(style.color);
    const [a, b] = [light(over([...color.slice(0, 3), color[3] * opacity], behind)), light(behind)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const found = (a + 0.05) / (b + 0.05);
    if (found < needed) {
      told.add(`contrast ${found.toFixed(2)}: ${one.tagName}.${one.className} ${style.color} '${walk.currentNode.textContent.trim().slice(0, 30)}'`);
    }
  }
  return [...told].slice(0, 8);
}
