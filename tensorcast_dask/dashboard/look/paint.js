// Gives figures the colours of the page, at the start and whenever those change.
export default (args) => {
  const paint = () => {
    const css = getComputedStyle(document.documentElement);
    const of = (name) => css.getPropertyValue(name).trim();
    const ink = of("--tc-ink"), soft = of("--tc-soft"), line = of("--tc-line"), grid = of("--tc-grid");
    for (const figure of args.figures) {
      figure.setv({outline_line_color: null, background_fill_color: null, border_fill_color: null});
      if (figure.title != null) figure.title.text_color = ink;
      for (const part of [...figure.below, ...figure.left, ...figure.above, ...figure.right]) {
        if (part.major_label_text_color === undefined) continue;
        part.setv({
          axis_label_text_color: soft, major_label_text_color: soft, axis_line_color: line,
          major_tick_line_color: line, minor_tick_line_color: null,
        });
      }
      for (const part of figure.center) {
        if (part.grid_line_color !== undefined) part.grid_line_color = grid;
      }
      for (const {glyph} of figure.renderers) {
        if (glyph == null) continue;
        if (glyph.tags.includes("ink")) glyph.text_color = {value: ink};
        if (glyph.tags.includes("soft")) glyph.text_color = {value: soft};
        if (glyph.tags.includes("band")) glyph.fill_color = {value: ink};
        if (glyph.tags.includes("line")) glyph.line_color = {value: ink};
      }
    }
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
};
