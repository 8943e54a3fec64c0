// Gives figures the colours of the page, at the start and whenever those change. What is set here
// is this browser's own: it is not sent back.
export default (args) => {
  const set = (model, values) => model.setv(values, {sync: false});
  const paint = () => {
    const css = getComputedStyle(document.documentElement);
    const of = (name) => css.getPropertyValue(name).trim();
    const ink = of("--tc-ink"), soft = of("--tc-soft"), line = of("--tc-line"), grid = of("--tc-grid");
    for (const figure of args.figures) {
      set(figure, {outline_line_color: null, background_fill_color: null, border_fill_color: null});
      for (const part of [...figure.below, ...figure.left, ...figure.above, ...figure.right]) {
        if (part.major_label_text_color === undefined) continue;
        set(part, {
          axis_label_text_color: soft, major_label_text_color: soft, axis_line_color: line,
          major_tick_line_color: line, minor_tick_line_color: null,
        });
      }
      for (const part of figure.center) {
        if (part.grid_line_color !== undefined) set(part, {grid_line_color: grid});
      }
      for (const {glyph} of figure.renderers) {
        if (glyph == null) continue;
        if (glyph.tags.includes("ink")) set(glyph, {text_color: {value: ink}});
        if (glyph.tags.includes("soft")) set(glyph, {text_color: {value: soft}});
        if (glyph.tags.includes("band")) set(glyph, {fill_color: {value: ink}});
        if (glyph.tags.includes("line")) set(glyph, {line_color: {value: ink}});
      }
    }
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
};
