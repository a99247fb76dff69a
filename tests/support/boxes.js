// Returns what is wrong with the boxes of a page's visible text, in words: wider than the page, cut off, or on another.
async () => {
  await new Promise((drawn) => setTimeout(() => requestAnimationFrame(drawn), 200)); // charts follow their width
  const SLACK = 1.5, SEEN = { checkOpacity: true, checkVisibilityCSS: true };
  const wrong = [], boxes = [], { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth > clientWidth) wrong.push(`the page is ${scrollWidth} px wide in ${clientWidth}`);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let node; (node = walk.nextNode()); ) {
    const words = node.data.trim(), holder = node.parentElement;
    if (!words || !holder.checkVisibility(SEEN) || holder.closest("script, style, title, [aria-hidden=true]")) continue;
    range.selectNodeContents(node);
    const all = [...range.getClientRects()].map(({ left, right, top, bottom }) => ({ left, right, top, bottom }));
    for (let around = holder; around && all.length; around = around.parentElement) {
      const look = getComputedStyle(around), frame = around.getBoundingClientRect();
      const isDrawing = around.tagName === "svg", kinds = isDrawing ? ["hidden", "hidden"] : [look.overflowX, look.overflowY];
      if (isDrawing || !["inline", "contents"].includes(look.display))
        for (const [kind, low, high] of [[kinds[0], "left", "right"], [kinds[1], "top", "bottom"]]) {
          if (around === document.body || around === document.documentElement) continue;
          for (const box of [...all]) {
            const isOut = box[low] < frame[low] - SLACK || box[high] > frame[high] + SLACK;
            if (!isOut || kind === "visible") continue;
            if (kind === "hidden" || kind === "clip") wrong.push(`"${words.slice(0, 60)}" is cut off`);
            if (box[low] >= frame[high] || box[high] <= frame[low]) all.splice(all.indexOf(box), 1);
            else { box[low] = Math.max(box[low], frame[low]); box[high] = Math.min(box[high], frame[high]); }
          }
        }
      if (look.position === "fixed") break;
    }
    for (const box of all) {
      if (box.left < -SLACK || box.right > clientWidth + SLACK) wrong.push(`"${words.slice(0, 60)}" is beyond the page`);
      boxes.push({ ...box, words, node });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((one, place) => {
    for (let next = place + 1; next < boxes.length && boxes[next].top < one.bottom - 2 * SLACK; next++) {
      const other = boxes[next], wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      if (other.node !== one.node && wide > 2 * SLACK) wrong.push(`"${one.words.slice(0, 60)}" is on "${other.words.slice(0, 60)}"`);
    }
  });
  return [...new Set(wrong)];
}
