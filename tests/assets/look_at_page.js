// How the page that is open looks, see tests/report/test_in_chromium.py: LEAST stands for the least contrast.
(() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const painted = (colors) => {
    pen.globalAlpha = 1;
    for (const [color, opacity] of colors) { pen.globalAlpha = opacity; pen.fillStyle = color; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => value / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const lineage = (element) => (element ? [...lineage(element.parentElement), element] : []);
  const faint = [];
  const seen = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const text = texts.currentNode.textContent.trim();
    if (!text || seen.has(element) || ["SCRIPT", "STYLE", "TITLE", "title", "NOSCRIPT"].includes(element.tagName)) continue;
    seen.add(element);
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    const backgrounds = [["white", 1]];
    let opacity = 1;
    for (const each of lineage(element)) {
      const style = getComputedStyle(each);
      opacity *= Number(style.opacity);
      backgrounds.push([style.backgroundColor, 1]);
    }
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [low, high] = [painted(backgrounds), painted([...backgrounds, [color, opacity]])].map(luminance).sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < LEAST) faint.push(`${contrast.toFixed(2)} <${element.tagName.toLowerCase()} class="${element.getAttribute("class") ?? ""}"> ${text.slice(0, 40)}`);
  }
  const root = document.documentElement;
  const wide = [];
  if (root.scrollWidth > root.clientWidth)
    for (const element of document.body.querySelectorAll("*"))
      if (element.getBoundingClientRect().right > root.clientWidth + 0.5) wide.push(`<${element.tagName.toLowerCase()} class="${element.getAttribute("class") ?? ""}">`);
  return { num_texts: seen.size, faint, overflow: root.scrollWidth - root.clientWidth, wide: wide.slice(0, 5) };
})()
