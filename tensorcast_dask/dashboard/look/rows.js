// Fits a figure to so many rows of one height; `right`, where it is given, names the column of the
// source that says how far its axis goes, with room for names before it and for text behind it.
export default (args, counts) => {
  const count = counts.data[args.count][0];
  const {figure} = args;
  figure.setv({visible: count > 0, frame_height: Math.max(1, count) * args.row});
  figure.y_range.setv({start: Math.max(1, count) - 0.5, end: -0.5});
  for (const one of args.also) one.visible = count > 0;
  let span = 1;
  if (args.source !== null) {
    span = Math.max(0.001, ...args.source.data[args.right]);
  }
  figure.x_range.setv({start: -args.before_it * span, end: (1 + args.behind_it) * span});
  for (const one of [...figure.above, ...figure.center]) {
    if (one.bounds !== undefined) one.bounds = [0, span];
  }
  if (args.before !== null) {
    const {page, pages} = counts.data;
    args.before.visible = args.after.visible = pages[0] > 1;
    args.before.disabled = page[0] === 0;
    args.after.disabled = page[0] + 1 >= pages[0];
  }
};
